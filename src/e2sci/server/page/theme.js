// The colours that were chosen here before, set before anything is painted. Not a module: those wait.
{
  const chosen = localStorage.getItem("e2sci.theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
}
