// Plays an algorithm step by step in each figure of the class `player`. _site/players.py bakes the runs, and says how they are written down.
// It starts by itself when it is in view, once, and never if the reader prefers reduced motion: then a step shows its end at once.
(() => {
  const MOVE_MS = 1000;
  const REST_MS = 600;
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const players = new Map();
  let active = null; // the one that plays: two at once would only distract

  const { node, shape } = window.oneaccordDraw;
  const icon = (path) => {
    const made = node("span", { "aria-hidden": "true" });
    shape(shape(made, "svg", { viewBox: "0 0 16 16", width: 16, height: 16 }), "path", { d: path, fill: "currentColor" });
    return made;
  };
  const ICONS = { back: "M4 3h2v10H4zM13 3v10L6.5 8z", forward: "M10 3h2v10h-2zM3 3v10L9.5 8z", play: "M4 2.5v11L13 8z", pause: "M4 3h3v10H4zM9 3h3v10H9z" };
  const ranksOf = (mask) => [...Array(9).keys()].filter((rank) => mask & (1 << rank));

  // Where everything stands: ranks around the middle, or in rows of one host each, with the largest cells that fit.
  const arrange = (run, reduces, wide) => {
    const size = run.cells.length;
    const most = [0, 1, 2].map((kind) => Math.max(...run.cells.map((counts) => counts[kind])));
    const columns = Math.max(most[0], most[2], Math.min(most[1], 4));
    const letters = Math.max(...run.names.map((name) => name.length)) * 6.5;
    const bare = letters ? 0 : 8; // signals have no names
    const part = reduces ? Math.max(2, Math.min(5, Math.round(20 / size))) : 0;
    const carried = Math.max(...run.steps.flatMap((step) => step[0].map((message) => widthOf(message[3], message[4]))));
    const lines = most.map((count) => Math.ceil(count / columns));
    let found = null;
    // [width of a cell, room for a name, room for the names of the rows]
    const cells = [[letters + 46, 1, 44], [letters + 30 + bare, 1, 44], [letters + 22 + bare, 1, 44], [letters + 14 + bare, 1, 44], [letters + 12 + bare, 1, 0], [17, 0, 0], [14, 0, 0], [11, 0, 0], [9, 0, 0], [7, 0, 0]];
    for (const [gapX, gapY, least] of [[Math.min(120, carried + 40), 48, 14], [40, 40, 11], [30, 32, 9], [16, 24, 7], [3, 10, 7]]) {
      const highest = gapX === 3 ? 960 : 600;
      for (const [cell, named, label] of cells) {
        if (cell < least) continue;
        const tall = reduces ? Math.max(14, size * part + 3) : named ? 16 : 13;
        const card = { w: Math.max(label + columns * cell + 12, 60), h: 24 + lines.reduce((sum, line) => sum + line * (tall + 2) + (line ? 2 : 0), 0) };
        for (let height = size < 4 ? 220 : 280; height <= highest && card.w <= wide; height += 20) {
          const places = placed(size, run.hosts, wide, height, card);
          const boxes = run.hosts > 1 ? hostsOf(places, run.hosts) : [];
          found = { columns, cell, named, letters, label, tall, lines, height, places, boxes };
          if (apart(places, gapX, gapY) && apart(boxes, 8, 28)) return found;
        }
      }
    }
    return found;
  };
  const apart = (boxes, gapX, gapY) =>
    boxes.every((a, i) => boxes.slice(i + 1).every((b) => a.x >= b.x + b.w + gapX || b.x >= a.x + a.w + gapX || a.y >= b.y + b.h + gapY || b.y >= a.y + a.h + gapY));
  const widthOf = (words, values) => words.length * 6.6 + values.length * 6 + (words ? 10 : 8);
  const placed = (size, hosts, wide, height, card) => {
    const ranks = [...Array(size).keys()];
    if (hosts > 1) {
      // A row for each host, or on a phone a column.
      const spread = (place, count, room, used) => 18 + (place * (room - 36 - used)) / Math.max(1, count - 1);
      return ranks.map((rank) => {
        const [own, host] = [rank % hosts, Math.floor(rank / hosts)];
        const [across, down] = wide < 560 ? [[host, size / hosts], [own, hosts]] : [[own, hosts], [host, size / hosts]];
        return { x: spread(...across, wide, card.w), y: 6 + spread(...down, height - 6, card.h), ...card };
      });
    }
    const wider = (ratio) => Math.sign(ratio) * Math.abs(ratio) ** 0.7; // towards the corners, where there is room
    return ranks.map((rank) => {
      const angle = (2 * Math.PI * (rank - (size % 2 ? 0 : 0.5))) / size - Math.PI / 2;
      const x = wide / 2 + ((wide - card.w) / 2 - 10) * wider(Math.cos(angle)) - card.w / 2;
      const y = height / 2 + ((height - card.h) / 2 - 10) * wider(Math.sin(angle)) - card.h / 2;
      return { x, y, ...card };
    });
  };
  const hostsOf = (places, hosts) => {
    const found = [];
    for (let first = 0; first < places.length; first += hosts) {
      const own = places.slice(first, first + hosts);
      const x = Math.min(...own.map((each) => each.x)) - 6;
      const y = Math.min(...own.map((each) => each.y)) - 16;
      found.push({ x, y, w: Math.max(...own.map((each) => each.x + each.w)) + 6 - x, h: Math.max(...own.map((each) => each.y + each.h)) + 6 - y });
    }
    return found;
  };
  // The points of a curve from one card to another, outside all cards if that can be; the two directions bend to different sides.
  const curve = (places, from, to) => {
    const [a, b] = [places[from], places[to]];
    const [ax, ay, bx, by] = [a.x + a.w / 2, a.y + a.h / 2, b.x + b.w / 2, b.y + b.h / 2];
    const inside = (box, [x, y], room) => x > box.x - room && x < box.x + box.w + room && y > box.y - room && y < box.y + box.h + room;
    let first = null;
    for (const more of [0, 0.15, -0.4, 0.3, -0.55, 0.5]) {
      const bend = 0.1 + 16 / Math.hypot(bx - ax, by - ay) + more;
      const [cx, cy] = [(ax + bx) / 2 - (by - ay) * bend, (ay + by) / 2 + (bx - ax) * bend];
      const points = [...Array(129).keys()]
        .map((each) => each / 128)
        .map((t) => [(1 - t) ** 2 * ax + 2 * t * (1 - t) * cx + t * t * bx, (1 - t) ** 2 * ay + 2 * t * (1 - t) * cy + t * t * by])
        .filter((point) => !inside(a, point, 2) && !inside(b, point, 7));
      first ??= points;
      if (!places.some((box) => box !== a && box !== b && points.some((point) => inside(box, point, 3)))) return points;
    }
    return first;
  };

  class Player {
    constructor(figure) {
      this.figure = figure;
      this.step = 0;
      this.state = "new"; // or "playing", "paused" by the reader, "hidden" while out of view, "done"
      const picture = figure.querySelector("img");
      const button = (name, label) => node("button", { type: "button", "aria-label": label, title: label }, icon(ICONS[name]));
      this.back = button("back", "Step back");
      this.play = button("play", "Play");
      this.forward = button("forward", "Step forward");
      this.slider = node("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Step" });
      this.world = node("select", { "aria-label": "Ranks" });
      this.root = node("select", { "aria-label": "Root" });
      this.rooted = node("label", { hidden: "" }, "Root ", this.root);
      this.words = node("p", { class: "player-words", id: `player-${figure.dataset.player}` });
      this.stage = node("div", { class: "player-stage" });
      const bar = node("div", { class: "player-bar" }, this.back, this.play, this.forward, this.slider, node("label", {}, "Ranks ", this.world), this.rooted);
      const rest = node("details", {}, node("summary", {}, "The whole run in one picture"), picture);
      figure.setAttribute("role", "group");
      figure.setAttribute("aria-label", `${picture.alt.split(":")[0]}, step by step`);
      figure.append(this.stage, bar, this.words, rest);
      this.play.addEventListener("click", () => (this.state === "playing" ? this.stop("paused") : this.start()));
      this.back.addEventListener("click", () => this.go(this.step - 1));
      this.forward.addEventListener("click", () => (still.matches || this.step === this.last ? this.go(this.step + 1) : this.start(true)));
      this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
      this.world.addEventListener("change", () => this.choose(Number(this.root.value)));
      this.root.addEventListener("change", () => this.choose(Number(this.root.value)));
    }

    receive(data) {
      this.data = data;
      for (const size of Object.keys(data.worlds)) this.world.append(node("option", {}, size));
      this.world.value = "4";
      this.rooted.hidden = !data.rooted;
      this.choose(0);
      new ResizeObserver(() => this.stage.clientWidth !== this.wide && this.build()).observe(this.stage);
      new IntersectionObserver(([seen]) => {
        const inView = seen.intersectionRatio >= 0.6;
        if (inView && !still.matches && !active && ["new", "hidden"].includes(this.state)) this.start();
        if (!inView && this.state === "playing") this.stop("hidden");
      }, { threshold: 0.6 }).observe(this.stage);
    }

    choose(root) {
      if (this.state !== "new") this.stop("paused");
      this.step = 0;
      const runs = this.data.worlds[this.world.value];
      const chosen = Math.min(root, runs.length - 1);
      this.root.replaceChildren(...runs.map((_, rank) => node("option", {}, String(rank))));
      this.root.value = String(chosen);
      this.run = runs[chosen];
      this.last = this.run.steps.length - 1;
      this.slider.max = this.last;
      this.build();
    }

    // Draw what stays: hosts, ranks and their cells.
    build() {
      const { run, data } = this;
      const size = run.cells.length;
      this.wide = this.stage.clientWidth;
      const at = (this.at = arrange(run, data.reduces, Math.max(this.wide, 300)));
      this.curves = {};
      this.stage.replaceChildren();
      const label = `${data.title}, ${size} ranks${data.rooted ? `, root ${this.root.value}` : ""}`;
      this.svg = shape(this.stage, "svg", { viewBox: `0 0 ${Math.max(this.wide, 300)} ${at.height}`, role: "img", "aria-label": label, "aria-describedby": this.words.id });
      at.boxes.forEach((box, host) => {
        shape(this.svg, "rect", { class: "host", x: box.x, y: box.y, width: box.w, height: box.h, rx: 10 });
        shape(this.svg, "text", { class: "small", x: box.x + 8, y: box.y + 12 }, `host ${host}`);
      });
      this.cells = at.places.map((card, rank) => {
        const group = shape(this.svg, "g");
        shape(group, "rect", { class: "node", x: card.x, y: card.y, width: card.w, height: card.h, rx: 6 });
        shape(group, "rect", { class: `rank-${rank}`, x: card.x + 7, y: card.y + 7, width: 9, height: 9, rx: 2 });
        shape(group, "text", { class: "name", x: card.x + 21, y: card.y + 15.5 }, `rank ${rank}`);
        const cells = [];
        let y = card.y + 22;
        run.cells[rank].forEach((count, kind) => {
          if (count && at.label) shape(group, "text", { class: "small", x: card.x + 7, y: y + at.tall / 2 + 3.5 }, data.rows[kind]);
          for (let place = 0; place < count; place++) {
            const x = card.x + 6 + at.label + (place % at.columns) * at.cell;
            cells.push({ x, y: y + Math.floor(place / at.columns) * (at.tall + 2), group: shape(group, "g"), where: `rank ${rank}, ${data.rows[kind]}` });
          }
          y += at.lines[kind] * (at.tall + 2) + (at.lines[kind] ? 2 : 0);
        });
        return cells;
      });
      this.paths = shape(this.svg, "g");
      this.show(this.step);
    }

    // Show the end of a step, with the messages that led to it; or with `moving`, the messages of the next one on their way.
    show(step, moving = null) {
      const { run } = this;
      const size = run.cells.length;
      if (moving === null || this.shown !== step) {
        const held = this.cells.map(() => new Map());
        for (const [rank, cell, value] of run.start) held[rank].set(cell, value);
        for (let earlier = 0; earlier <= step; earlier++) for (const [rank, cell, value] of run.steps[earlier][1]) held[rank].set(cell, value);
        const fresh = new Set(moving === null ? run.steps[step][1].map(([rank, cell]) => `${rank} ${cell}`) : []);
        this.cells.forEach((cells, rank) => cells.forEach((cell, place) => this.fill(cell, held[rank].get(place), fresh.has(`${rank} ${place}`))));
        this.shown = moving === null ? null : step;
      }
      this.paths.replaceChildren();
      for (const [from, to, added, words, values] of run.steps[moving === null ? step : step + 1][0]) {
        const points = (this.curves[`${from} ${to}`] ??= curve(this.at.places, from, to));
        if (points.length < 2) continue;
        const [x, y] = points[points.length - 1];
        const [px, py] = points[Math.max(0, points.length - 4)];
        shape(this.paths, "path", { class: "way", d: `M${points.map((point) => point.map((each) => each.toFixed(1)).join(" ")).join("L")}` });
        const end = shape(this.paths, "g", { class: "end", transform: `translate(${x} ${y}) rotate(${(Math.atan2(y - py, x - px) * 180) / Math.PI})` });
        if (added) shape(end, "circle", { r: 5.5 });
        shape(end, "path", { class: added ? "plus" : "head", d: added ? "M-3 0H3M0-3V3" : "M5 0L-4-5V5z" });
        this.parcel(points, words, values.map((value) => value % 2 ** size), moving === null ? 1 : moving);
      }
      if (moving === null) this.tell();
    }

    fill({ x, y, group, where }, value, fresh) {
      const { at, run, data } = this;
      const size = run.cells.length;
      const mask = value === undefined ? 0 : value % 2 ** size;
      const name = value === undefined ? "" : run.names[Math.floor(value / 2 ** size)];
      group.replaceChildren();
      shape(group, "title", {}, value === undefined ? `${where}: empty` : `${where}: ${name} of rank ${ranksOf(mask).join(" + ")}`);
      shape(group, "rect", { class: value === undefined ? "empty" : fresh ? "fresh" : "full", x: x + 1, y, width: at.cell - 2, height: at.tall, rx: 2 });
      if (value === undefined) return;
      const letters = at.named && name ? at.letters + 4 : 0;
      if (letters) shape(group, "text", { class: "letter", x: x + 1 + letters / 2 + 0.5, y: y + at.tall / 2 + 3.5 }, name);
      const room = letters ? 5 : 3;
      parts(group, x + room / 2 + letters, y + 1.5, at.cell - room - letters, at.tall - 3, mask, data.reduces ? size : 0);
    }

    // What a message carries, as a label that moves along its way and rests before the arrow.
    parcel(points, words, masks, moved) {
      const size = this.data.reduces ? this.run.cells.length : 0;
      const wide = widthOf(words, masks);
      const tall = size ? Math.max(16, size * 2 + 4) : 16;
      const [endX, endY] = points[points.length - 1];
      const clear = ([x, y]) => Math.abs(x - endX) > wide / 2 + 9 || Math.abs(y - endY) > tall / 2 + 9;
      let stop = points.length - 1;
      while (stop > points.length / 2 && !clear(points[stop])) stop--;
      const [x, y] = points[Math.round(stop * moved)];
      const group = shape(this.paths, "g", { transform: `translate(${x - wide / 2} ${y - tall / 2})` });
      shape(group, "rect", { class: "parcel", width: wide, height: tall, rx: 3 });
      if (words) shape(group, "text", { class: "letter", x: 4 + words.length * 3.3, y: tall / 2 + 3.5 }, words);
      masks.forEach((mask, place) => parts(group, wide - 3 - (masks.length - place) * 6, 2, 5, tall - 4, mask, size));
    }

    tell() {
      const [messages] = this.run.steps[this.step];
      const list = (added) => messages.filter((each) => each[2] === added).map(([from, to, , words]) => `${words ? `${words} from ` : ""}${from} to ${to}`).join(", ");
      const [reduced, stored] = [list(1), list(0)];
      const barrier = this.data.rows[2] === "heard";
      const parts = [this.step ? `Step ${this.step} of ${this.last}.` : barrier ? "Start: each rank knows of itself alone." : "Start: the input, and what a rank copies from it."];
      if (reduced) parts.push(`${barrier ? "Signals" : "Reduced on arrival"}: ${reduced}.`);
      if (stored) parts.push(`Stored: ${stored}.`);
      if (this.step === this.last) parts.push("Done.");
      this.words.textContent = parts.join(" ");
      this.slider.value = this.step;
      this.slider.setAttribute("aria-valuetext", `${this.step} of ${this.last}`);
      this.back.disabled = this.step === 0;
      this.forward.disabled = this.step === this.last;
    }

    go(step) {
      this.stop("paused");
      this.step = Math.max(0, Math.min(this.last, step));
      this.show(this.step);
    }

    start(once = false) {
      if (active && active !== this) active.stop("paused");
      cancelAnimationFrame(this.frame);
      if (this.step === this.last) this.step = 0;
      this.mark("playing");
      active = this;
      let began = null;
      let rested = false;
      const tick = (now) => {
        began ??= now;
        const passed = now - began;
        if (passed < MOVE_MS && !still.matches) {
          const moved = passed / MOVE_MS;
          this.show(this.step, moved * moved * (3 - 2 * moved));
        } else if (!rested) {
          rested = true;
          this.show(++this.step);
          if (once) return this.stop("paused");
        } else if (passed >= MOVE_MS + REST_MS) {
          if (this.step === this.last) return this.stop("done");
          began = now;
          rested = false;
        }
        this.frame = requestAnimationFrame(tick);
      };
      this.frame = requestAnimationFrame(tick);
    }

    stop(state) {
      cancelAnimationFrame(this.frame);
      if (active === this) active = null;
      this.mark(state);
      if (this.shown !== null) this.show(this.step);
    }

    mark(state) {
      this.state = state;
      const playing = state === "playing";
      this.play.replaceChildren(icon(playing ? ICONS.pause : ICONS.play));
      for (const name of ["aria-label", "title"]) this.play.setAttribute(name, playing ? "Pause" : "Play");
      this.words.setAttribute("aria-live", playing ? "off" : "polite");
    }
  }

  // The data of a chunk: a stripe for each rank whose input it combines, or the colour of the one rank that it comes from.
  const parts = (group, x, y, wide, tall, mask, size) => {
    for (const rank of ranksOf(mask)) {
      const high = size ? tall / size : tall;
      shape(group, "rect", { class: `rank-${rank}`, x, y: y + (size ? rank * high : 0), width: wide, height: Math.max(1, high - (size ? 0.5 : 0)) });
    }
  };

  window.oneaccordPlayer = (name, data) => players.get(name).receive(data);
  const near = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      document.head.append(node("script", { src: `${document.documentElement.dataset.content_root}_players/${target.dataset.player}.js` }));
    }
  }, { rootMargin: "800px" });
  for (const figure of document.querySelectorAll("figure.player")) {
    players.set(figure.dataset.player, new Player(figure));
    near.observe(figure);
  }
})();
