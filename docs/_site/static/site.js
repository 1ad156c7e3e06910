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

// Questions in whole sentences. The search of Sphinx finds an entry of the index if the query is a part of it: "send dict" for "dict". Here a main
// entry is found also if all its words are in the query, in any order and form: "how can I send a dict". An entry with a word that any question
// may have, such as "out of memory", is found as a part alone. questions.py makes the entries.
(() => {
  const begin = () => {
    if (typeof Search === "undefined" || typeof Stemmer === "undefined") return;
    const stemmer = new Stemmer();
    const words = (text) => splitQuery(text.toLowerCase()).map((word) => stemmer.stemWord(word));
    const perform = Search._performSearch;
    Search._performSearch = (query, ...rest) => {
      const results = perform(query, ...rest);
      const asked = words(query).filter((word) => !stopwords.has(word));
      const index = Search._index;
      for (const [entry, places] of Object.entries(index.indexentries)) {
        const named = words(entry);
        if (!named.length || !named.every((word) => asked.includes(word))) continue;
        for (const [file, id, isMain] of places) {
          if (!isMain || index.docnames[file] === "glossary") continue; // terms of the glossary are single words of everything
          const score = 20 + Math.round((80 * named.length) / asked.length);
          const anchor = id ? `#${id}` : "";
          const at = results.findIndex((each) => each[0] === index.docnames[file] && each[2] === anchor && each[3] === null);
          if (at >= 0 && results[at][4] >= score) continue;
          if (at >= 0) results.splice(at, 1);
          results.push([index.docnames[file], index.titles[file], anchor, null, score, index.filenames[file], "index"]);
        }
      }
      return results.sort((one, other) => one[4] - other[4]); // the last one is shown first
    };
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
