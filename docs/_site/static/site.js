// Words around a search result without a server. The search of Sphinx fetches the page that it found, which a browser forbids for a file: here
// `fetch` takes the text of a page from a script beside it, _texts/PAGE.js, which the build writes.
(() => {
  if (location.protocol !== "file:") return;
  const ask = window.fetch;
  const texts = {};
  window.oneaccordText = (page, html) => {
    texts[page] = html;
  };
  const load = (page) =>
    new Promise((resolve) => {
      if (page in texts) return resolve(texts[page]);
      const script = document.createElement("script");
      script.src = `${document.documentElement.dataset.content_root}_texts/${page}.js`;
      script.onload = script.onerror = () => resolve(texts[page] || "");
      document.head.append(script);
    });
  window.fetch = (what, options) => {
    const root = new URL(document.documentElement.dataset.content_root, location.href).href;
    const url = new URL(what, location.href).href;
    if (!url.startsWith(root) || !url.includes(".html")) return ask(what, options);
    const page = url.slice(root.length).split(".html")[0];
    return load(page).then((html) => new Response(html));
  };
})();
