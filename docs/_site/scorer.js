// The scores of search results: those of Sphinx, but that tables of measurements come after the pages that explain them.
var Scorer = {
  score: ([page, , , , score]) => (page.startsWith("measured/") ? score - 14 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
