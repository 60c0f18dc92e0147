const hidden = new Set();
const views = new Map();

function colors() {
  const css = getComputedStyle(document.documentElement);
  const of = (name) => css.getPropertyValue(name).trim();
  const font = getComputedStyle(document.body).fontFamily;
  return {
    background: null, font,
    view: { stroke: null },
    axis: { labelColor: of("--soft"), titleColor: of("--soft"), gridColor: of("--rule"),
      domainColor: of("--rule"), tickColor: of("--rule"), titleFontWeight: "normal",
      labelFontSize: 11, titleFontSize: 12, labelOverlap: true },
    legend: { labelColor: of("--soft"), titleColor: of("--soft") },
    boxplot: { median: { color: of("--ink") } },
  };
}

// The page has one legend for all charts, hides lines, and follows the pointer.
function ofPage(text) {
  const spec = JSON.parse(text, (_, x) => x?.field === "line" && x.legend ? { ...x, legend: null } : x);
  if (spec.layer?.[0].mark.type === "line") spec.layer.push(nearestPoint(spec.encoding));
  return {
    ...spec, width: "container", autosize: { type: "fit-x", contains: "padding" },
    params: [{ name: "hidden", value: [] }],
    transform: [{ filter: "indexof(hidden, datum.line) < 0" }],
    config: { customFormatTypes: true, ...colors() },
  };
}

function nearestPoint({ x, y }) {
  const select = { type: "point", on: "pointerover", nearest: true, clear: "pointerout" };
  return {
    params: [{ name: "near", select }],
    mark: { type: "point", filled: true, size: 90 },
    encoding: {
      opacity: { condition: { param: "near", empty: false, value: 1 }, value: 0 },
      tooltip: [
        // Only with a format is the line that of the point which is nearest.
        { field: "line", type: "nominal", format: "", formatType: "toString" },
        { field: "x", title: x.title, format: ".4~g" },
        { field: "y", title: y.title, format: ".4~g" },
      ],
    },
  };
}

async function draw(place) {
  const spec = ofPage(place.dataset.spec);
  const made = await vegaEmbed(place, spec, { actions: false, renderer: "svg" });
  made.view.signal("hidden", [...hidden]).runAsync();
  views.set(place, made);
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting && !views.has(entry.target)) {
      views.set(entry.target, null);
      draw(entry.target);
    }
  }
}, { rootMargin: "400px" });

function showHidden() {
  for (const chip of document.querySelectorAll(".chip")) {
    chip.setAttribute("aria-pressed", String(!hidden.has(chip.dataset.line)));
  }
  for (const row of document.querySelectorAll("[data-line]:not(.chip)")) {
    if (row.tagName === "TR") row.classList.toggle("hidden-line", hidden.has(row.dataset.line));
    else row.hidden = hidden.has(row.dataset.line);
  }
  for (const made of views.values()) made?.view.signal("hidden", [...hidden]).runAsync();
}

function sortBy(head) {
  const table = head.closest("table"), column = head.cellIndex;
  const down = head.getAttribute("aria-sort") !== "descending";
  for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (row) => {
    const cell = row.cells[column], number = cell.dataset.value;
    return number === undefined ? cell.textContent.trim() : number === "" ? -Infinity : Number(number);
  };
  const rows = [...table.tBodies[0].rows].sort((a, b) => (value(a) < value(b) ? -1 : 1) * (down ? -1 : 1));
  table.tBodies[0].append(...rows);
}

document.addEventListener("click", (event) => {
  const chip = event.target.closest(".chip");
  if (chip) {
    const line = chip.dataset.line;
    hidden.has(line) ? hidden.delete(line) : hidden.add(line);
    showHidden();
  }
  const head = event.target.closest("table.sortable th");
  if (head && head.closest("thead")) sortBy(head);
});

// Charts in sight are drawn first, then the others, one by one, so that paper shows all.
async function drawOthers() {
  for (const place of document.querySelectorAll(".chart")) {
    if (views.has(place) || !place.clientWidth) continue; // closed ones when they open
    views.set(place, null);
    await draw(place);
  }
}

function start() {
  for (const place of document.querySelectorAll(".chart")) seen.observe(place);
  showHidden();
  drawOthers();
}
start();

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const place of views.keys()) draw(place);
});

// A live page asks for itself, and takes over what has changed.
async function refresh() {
  const answer = await fetch(location.href, { cache: "no-store" }).catch(() => null);
  const fresh = document.getElementById("fresh");
  if (!answer?.ok) { fresh.textContent = "the server does not answer"; return; }
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const old = [...document.querySelectorAll("details")].filter((x) => x.open).map((x) => x.textContent.slice(0, 60));
  const place = document.getElementById("page"), news = page.getElementById("page");
  const specs = (of) => [...of.querySelectorAll(".chart")].map((x) => x.dataset.spec).join();
  if (specs(place) === specs(news) && news.querySelector("main").textContent === place.dataset.words) return;
  const height = scrollY;
  for (const made of views.values()) made?.view.finalize();
  views.clear();
  place.replaceChildren(...news.childNodes);
  place.dataset.words = place.querySelector("main").textContent;
  for (const x of document.querySelectorAll("details")) if (old.includes(x.textContent.slice(0, 60))) x.open = true;
  start();
  scrollTo(0, height);
}
if (LIVE) {
  document.getElementById("page").dataset.words = document.querySelector("main").textContent;
  setInterval(() => { if (!document.hidden) refresh(); }, 5000);
}
