// Draws the predicted times of a collective in each figure of the class `curves`, with a slider for the world and one for the bytes.
// _site/curves.py bakes the times; its table stays, below the chart, and follows what is chosen.
(() => {
  const { sizes, hosts, worlds } = window.oneaccordCurves;
  const HIGH = 340;
  const EDGE = { left: 58, right: 22, top: 12, bottom: 44 };
  const { node, shape } = window.oneaccordDraw;
  const time = (seconds) => {
    const [unit, factor] = seconds < 1e-3 ? ["us", 1e6] : seconds < 1 ? ["ms", 1e3] : ["s", 1];
    return `${Number((seconds * factor).toPrecision(3))} ${unit}`;
  };

  class Chart {
    constructor(figure) {
      this.figure = figure;
      const option = (name) => node("option", {}, name);
      const slider = (label, last, value) => node("input", { type: "range", min: 0, max: last, value, "aria-label": label });
      this.collective = node("select", { "aria-label": "Collective" }, ...Object.keys(worlds[0][1]).map(option));
      this.collective.value = figure.dataset.first;
      this.world = slider("Ranks", worlds.length - 1, worlds.length - 1);
      this.bytes = slider("Bytes of the call", sizes.length - 1, Math.floor(sizes.length / 2));
      this.worldWords = node("output");
      this.bytesWords = node("output");
      this.stage = node("div", { class: "curves-stage" });
      this.values = node("ul", { class: "curves-values" });
      const bar = node("div", { class: "player-bar" },
        node("label", {}, "Collective ", this.collective),
        node("label", { class: "curves-slider" }, "Ranks", this.world, this.worldWords),
        node("label", { class: "curves-slider" }, "Bytes", this.bytes, this.bytesWords));
      const table = node("details", {}, node("summary", {}, "The times as a table"), figure.querySelector(".curves-table"));
      figure.prepend(bar, this.stage, this.values);
      figure.append(table);
      figure.setAttribute("role", "group");
      figure.setAttribute("aria-label", "Predicted times");
      for (const control of [this.collective, this.world, this.bytes]) control.addEventListener("input", () => this.draw());
      this.stage.addEventListener("pointermove", (event) => {
        const [first, last] = [this.x(0), this.x(sizes.length - 1)];
        const place = ((event.clientX - this.stage.getBoundingClientRect().left - first) / (last - first)) * (sizes.length - 1);
        this.bytes.value = Math.round(place); // the slider keeps it in its range
        this.draw();
      });
      new ResizeObserver(() => this.stage.clientWidth !== this.wide && this.draw()).observe(this.stage);
    }

    x(place) {
      return EDGE.left + (place * (this.wide - EDGE.left - EDGE.right)) / (sizes.length - 1);
    }

    draw() {
      this.wide = Math.max(this.stage.clientWidth, 280);
      const name = this.collective.value;
      const [world, bytes] = [Number(this.world.value), Number(this.bytes.value)];
      const { times, chosen } = worlds[world][1][name];
      // The axis of time and the colours are those of all worlds, so that only the curves move.
      const all = worlds.flatMap(([, each]) => Object.values(each[name].times).flat());
      const [low, high] = [Math.floor(Math.log10(Math.min(...all))), Math.ceil(Math.log10(Math.max(...all)))];
      const y = (seconds) => HIGH - EDGE.bottom - ((Math.log10(seconds) - low) / (high - low)) * (HIGH - EDGE.top - EDGE.bottom);
      const colours = Object.keys(worlds[worlds.length - 1][1][name].times);
      this.worldWords.textContent = hosts[world].replace(" ranks", "");
      this.bytesWords.textContent = sizes[bytes];
      this.world.setAttribute("aria-valuetext", hosts[world]);
      this.bytes.setAttribute("aria-valuetext", sizes[bytes]);

      const label = `Predicted time of ${name} against bytes, ${hosts[world]}: ${Object.keys(times).join(", ")}. The table below has the numbers.`;
      const root = shape(node("div"), "svg", { viewBox: `0 0 ${this.wide} ${HIGH}`, role: "img", "aria-label": label });
      for (let power = low; power <= high; power++) {
        shape(root, "path", { class: "grid", d: `M${EDGE.left} ${y(10 ** power)}H${this.wide - EDGE.right}` });
        shape(root, "text", { class: "tick", x: EDGE.left - 8, y: y(10 ** power) + 4, "text-anchor": "end" }, time(10 ** power));
      }
      const every = this.wide < 520 ? 4 : 2;
      sizes.forEach((size, place) => {
        if (place % every === 0) shape(root, "text", { class: "tick", x: this.x(place), y: HIGH - EDGE.bottom + 18, "text-anchor": "middle" }, size);
      });
      shape(root, "text", { class: "tick", x: (this.wide + EDGE.left - EDGE.right) / 2, y: HIGH - 6, "text-anchor": "middle" }, "bytes of the call");
      shape(root, "path", { class: "cross", d: `M${this.x(bytes)} ${EDGE.top}V${HIGH - EDGE.bottom}` });
      for (const [algorithm, row] of Object.entries(times)) {
        const colour = colours.indexOf(algorithm);
        const points = row.map((seconds, place) => `${this.x(place).toFixed(1)} ${y(seconds).toFixed(1)}`);
        shape(root, "path", { class: `curve line-${colour}`, d: `M${points.join("L")}`, "stroke-dasharray": colour % 2 ? "6 3" : "none" });
        row.forEach((seconds, place) => {
          if (chosen[place] === algorithm) shape(root, "circle", { class: `chosen line-${colour}`, cx: this.x(place), cy: y(seconds), r: 4.5 });
        });
      }
      this.stage.replaceChildren(root);

      const sorted = Object.entries(times).sort((one, other) => one[1][bytes] - other[1][bytes]);
      this.values.replaceChildren(...sorted.map(([algorithm, row]) => {
        const key = node("span", { "aria-hidden": "true" });
        const colour = colours.indexOf(algorithm);
        const line = shape(key, "svg", { viewBox: "0 0 22 8", width: 22, height: 8 });
        shape(line, "path", { class: `curve line-${colour}`, d: "M0 4H22", "stroke-dasharray": colour % 2 ? "6 3" : "none" });
        return node("li", {}, key, ` ${algorithm} `, node("strong", {}, time(row[bytes])), chosen[bytes] === algorithm ? " (chosen)" : "");
      }));
      this.fill(name, hosts[world], times, chosen);
    }

    fill(name, where, times, chosen) {
      const table = this.figure.querySelector("table");
      table.caption.textContent = `Predicted time of ${name}, ${where}; ● marks what the table chooses`;
      const heads = ["bytes", ...Object.keys(times)].map((each) => node("th", { scope: "col" }, each));
      table.tHead.replaceChildren(node("tr", {}, ...heads));
      table.tBodies[0].replaceChildren(...sizes.map((size, place) => {
        const cells = Object.entries(times).map(([each, row]) => node("td", {}, `${time(row[place])}${chosen[place] === each ? " ●" : ""}`));
        return node("tr", {}, node("th", { scope: "row" }, size), ...cells);
      }));
    }
  }

  for (const figure of document.querySelectorAll("figure.curves")) new Chart(figure);
})();
