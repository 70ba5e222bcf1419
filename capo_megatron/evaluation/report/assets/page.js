"use strict";
// Charts at once; the responses when the rest of the page has arrived.

function failed(where, error) {
  document.querySelectorAll(where).forEach((box) => box.replaceChildren(`This browser cannot show it: ${error.message}.`));
}

drawCharts().catch((error) => failed("[data-charts]", error));

function openBrowser() {
  const message = document.getElementById("no-browser");
  Browser.start().then((browser) => {
    if (!browser.index.rows) { message.textContent = "There are no responses to read."; return; }
    document.getElementById("browser").hidden = false;
    message.remove();
    browser.begin();
  }).catch((error) => failed("#no-browser", error));
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", openBrowser); else openBrowser();
