// Runs before the page is painted, so that a theme that was chosen earlier does not flash.
"use strict";
try {
  const chosen = localStorage.getItem("capo-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* some browsers refuse to store for files */ }
