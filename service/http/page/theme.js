// Before anything is drawn: the theme that was chosen here last, if it is not the system's.
// A plain script, because modules run after the first paint.
(() => {
  const kept = localStorage.getItem("dss-theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
})();
