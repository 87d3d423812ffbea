// The search page. Its state is the address: the query, the number of hits, the labels, the view.
import { colourOf, setClasses } from "/colours.js";
import { IndexMap } from "/map.js";

const $ = (id) => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const counted = (n, one, many) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
const megabytes = (bytes) => `${(bytes / 2 ** 20).toLocaleString("en", { maximumSignificantDigits: 3 })} MB`;
const pictureURL = (id, side) => `/api/picture?${new URLSearchParams({ id, side })}`;
const shownLabel = (item) => item.label ?? "no label";
const fileName = (path) => path.split(/[\\/]/).pop();

let about = null;
let current = null; // the search in progress
let uploadCount = 0;
const placed = new Map(); // the nearest of all pictures to each of them, which place it on the map
let early = null; // a picture that came before the page was ready
const uploads = new Map(); // uploaded pictures, kept in this page only, for the back button

// ---- state and address

function stateOf(location) {
  const asked = new URLSearchParams(location.search);
  return {
    id: asked.get("id"),
    upload: asked.get("upload"),
    k: Number(asked.get("k")) || 20,
    labels: asked.getAll("label"),
    map: asked.has("map"),
  };
}

function addressOf(state) {
  const words = new URLSearchParams();
  if (state.id !== null) words.set("id", state.id);
  if (state.upload !== null) words.set("upload", state.upload);
  if (state.k !== 20) words.set("k", state.k);
  for (const label of state.labels) words.append("label", label);
  if (state.map) words.set("map", "");
  const text = words.toString();
  return text ? `/?${text}` : "/";
}

const now = () => stateOf(window.location);

function go(changes, { replace = false } = {}) {
  const address = addressOf({ ...now(), ...changes });
  history[replace ? "replaceState" : "pushState"](null, "", address);
  show();
}

// ---- talking to the server

class Sentence extends Error {}

async function ask(address, options = {}, tries = 4) {
  let answer;
  try {
    answer = await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Sentence("The server does not answer: is it still running?");
  }
  if (answer.status === 503 && tries > 1) {
    const seconds = Number(answer.headers.get("Retry-After")) || 1;
    say("The server is busy; trying again…");
    await new Promise((wake) => setTimeout(wake, 1000 * seconds));
    return ask(address, options, tries - 1);
  }
  if (answer.ok) return answer.json();
  const known = await answer.json().catch(() => ({}));
  throw new Sentence(known.error ?? `The server answered with status ${answer.status}.`);
}

function search(state, signal) {
  const words = new URLSearchParams({ k: Math.min(state.k, about.most_hits) });
  for (const label of state.labels) words.append("label", label);
  if (state.id !== null) {
    words.set("id", state.id);
    return ask(`/api/search?${words}`, { signal });
  }
  const file = uploads.get(state.upload);
  if (!file) throw new Sentence("Uploaded pictures are lost when the page is reloaded: choose the picture again.");
  const type = file.type || "application/octet-stream";
  return ask(`/api/search?${words}`, { signal, method: "POST", body: file, headers: { "Content-Type": type } });
}

// ---- showing

function say(sentence, { error = false } = {}) {
  $("status").textContent = sentence;
  $("status").classList.toggle("error", error);
}

async function show() {
  const state = now();
  const wasInside = $("hits").contains(document.activeElement);
  current?.abort();
  current = new AbortController();
  const { signal } = current;
  showSettings(state);
  showView(state);
  if (state.id === null && state.upload === null) {
    showQuery(null);
    map.show({ hits: [], query: null, labels: state.labels });
    return showExamples(state, signal);
  }
  if (state.upload !== null) showQuery({ file: uploads.get(state.upload) });
  say("Searching…");
  $("hits").classList.add("stale");
  try {
    const found = await search(state, signal);
    if (found.query) showQuery({ item: found.query });
    showHits(found, state);
    if (state.upload !== null && (!state.labels.length || !placed.has(state.upload))) placed.set(state.upload, found.hits);
    const near = state.id === null ? placed.get(state.upload) : [];
    map.show({ hits: found.hits.map((hit) => hit.id), query: state.id, labels: state.labels, near });
    if (wasInside) $("hits").querySelector("a")?.focus();
  } catch (error) {
    fail(error, signal);
  }
}

function fail(error, signal) {
  if (signal.aborted) return;
  $("hits").replaceChildren();
  $("hits").classList.remove("stale");
  map.show({ hits: [], query: null, labels: now().labels });
  if (!(error instanceof Sentence)) console.error(error);
  say(error instanceof Sentence ? error.message : "Something went wrong in this page.", { error: true });
}

async function showExamples(state, signal) {
  say("Loading…");
  try {
    const asked = new URLSearchParams({ count: Math.min(state.k, about.most_hits) });
    for (const label of state.labels) asked.append("label", label);
    const { items } = await ask(`/api/examples?${asked}`, { signal });
    $("hits").classList.remove("stale");
    $("hits").replaceChildren(...items.map((item) => card(item, state)));
    if (!about.items) return say("The index is empty: add pictures with nearkin index.");
    if (!items.length) return say("No picture has this label.");
    say(about.by_picture ? "Or start with one of these." : "Start with one of these.");
  } catch (error) {
    fail(error, signal);
  }
}

function showHits({ hits, query }, state) {
  const rows = [];
  const same = hits.filter((hit) => hit.same).length;
  if (about.threshold && hits.length) {
    const { similarity, precision } = about.threshold;
    const sure = precision == null ? "" : `; ${Math.round(100 * precision)} % of such pairs were of the same class at calibration`;
    const from = `similarity of at least ${similarity.toFixed(2)}${sure}`;
    rows.push(cut(same ? "Taken for the same class" : "None is taken for the same class", from, same > 0));
  }
  hits.forEach((hit, place) => {
    if (about.threshold && same && place === same) rows.push(cut("Less similar"));
    rows.push(card(hit, state, query?.label));
  });
  $("hits").replaceChildren(...rows);
  $("hits").classList.remove("stale");
  if (!hits.length) return say(state.labels.length ? "No other picture has this label." : "There is no other picture in the index.");
  const best = `the nearest: ${shownLabel(hits[0])}, similarity ${hits[0].similarity.toFixed(3)}`;
  say(`${counted(hits.length, "picture", "pictures")} like ${query ? "this one" : "yours"}, ${best}.`);
}

function cut(text, why = "", same = false) {
  return make("li", { class: same ? "cut same" : "cut" }, make("span", {}, make("b", {}, text), make("small", {}, why)));
}

function card(item, state, wanted) { // `wanted`: the label of the query, if it has one
  const link = make("a", { class: item.same ? "hit same" : "hit", href: addressOf({ ...state, id: item.id, upload: null }), title: item.path });
  link.style.setProperty("--colour", colourOf(item.label));
  link.append(frame(pictureURL(item.id, 256), `${shownLabel(item)}, ${fileName(item.path)}`), words(item));
  if (item.similarity !== undefined) {
    const bar = make("i", { "aria-hidden": "true" });
    bar.style.setProperty("--part", `${Math.max(0, Math.min(100, 100 * item.similarity))}%`);
    const similarity = make("span", {}, item.similarity.toFixed(3));
    link.lastChild.append(make("span", { class: "like" }, make("span", { class: "aside" }, "similarity "), similarity, bar));
    if (item.same) link.lastChild.append(make("span", { class: "aside" }, "taken for the same class"));
  }
  if (wanted != null && item.label !== wanted) {
    link.classList.add("other");
    link.append(make("span", { class: "badge" }, "other label"));
  }
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return; // opens a new tab, as any link does
    event.preventDefault();
    go({ id: item.id, upload: null });
    window.scrollTo({ top: 0 });
  });
  return make("li", {}, link);
}

function frame(source, alt) {
  const image = make("img", { src: source, alt, loading: "lazy", decoding: "async" });
  const box = make("span", { class: "frame" }, image);
  image.addEventListener("load", () => image.classList.toggle("tiny", image.naturalWidth < 100));
  image.addEventListener("error", () => box.replaceChildren("The picture cannot be shown."));
  return box;
}

function words(item) {
  const label = make("span", { class: "label" }, make("span", { class: "swatch" }), make("b", {}, shownLabel(item)));
  return make("span", { class: "words" }, label);
}

function showQuery(query) {
  const box = $("query");
  const old = box.querySelector("img")?.src;
  if (old?.startsWith("blob:")) URL.revokeObjectURL(old);
  box.replaceChildren();
  $("hint").hidden = query !== null;
  const more = make("span", { class: query ? "less" : "" }, " picture"); // on a phone for screen readers only
  document.querySelector("label[for=file]").replaceChildren(query ? "Another" : "Choose a", more);
  if (!query || ("file" in query && !query.file)) return;
  if (query.file) {
    box.append(frame(URL.createObjectURL(query.file), "Your picture"), make("div", { class: "words" }, make("p", {}, "Your picture"), make("p", { class: "path" }, make("span", {}, query.file.name ?? ""))));
    return;
  }
  const text = words(query.item);
  text.style.setProperty("--colour", colourOf(query.item.label));
  const name = fileName(query.item.path); // if a path is too long, its end says more
  const folder = query.item.path.slice(0, query.item.path.length - name.length);
  text.append(make("p", { class: "path", title: query.item.path }, make("span", {}, folder), make("span", {}, name)));
  box.append(frame(pictureURL(query.item.id, 256), `Query: ${shownLabel(query.item)}`), text);
}

function showSettings(state) {
  if (![...$("k").options].some((option) => option.value === String(state.k))) $("k").append(make("option", {}, String(state.k)));
  $("k").value = String(state.k);
  $("chosen").replaceChildren(
    ...state.labels.map((label) => {
      const swatch = make("i", { class: "swatch" });
      swatch.style.setProperty("--colour", colourOf(label));
      const button = make("button", { type: "button", "aria-label": `Remove the label ${label}` }, swatch, make("span", {}, label), "×");
      button.addEventListener("click", () => {
        go({ labels: now().labels.filter((other) => other !== label) });
        $("label").focus();
      });
      return make("li", {}, button);
    }),
  );
}

// ---- views: side by side if there is room, else two tabs

function showView(state) {
  document.body.classList.toggle("on-map", state.map);
  for (const [tab, on] of [["results", !state.map], ["map", state.map]]) {
    $(`tab-${tab}`).setAttribute("aria-selected", String(on));
    $(`tab-${tab}`).tabIndex = on ? 0 : -1;
  }
  map.resize();
}

for (const tab of ["results", "map"]) {
  $(`tab-${tab}`).addEventListener("click", () => go({ map: tab === "map" }, { replace: true }));
  $(`tab-${tab}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tab === "map" ? "results" : "map";
    $(`tab-${other}`).click();
    $(`tab-${other}`).focus();
  });
}

// ---- uploads: chosen, dropped, pasted

function searchUpload(file) {
  if (!file) return;
  if (!about) {
    early = file;
    return;
  }
  if (!about.by_picture) return say(about.by_picture_why ?? "Uploaded pictures cannot be searched here.", { error: true });
  if (file.type && !file.type.startsWith("image/")) return say("That is not a picture.", { error: true });
  if (file.size > about.upload_bytes) {
    return say(`That picture has ${megabytes(file.size)}; the limit is ${megabytes(about.upload_bytes)}.`, { error: true });
  }
  uploadCount += 1;
  const number = String(uploadCount);
  uploads.set(number, file);
  if (uploads.size > 50) {
    const [oldest] = uploads.keys();
    uploads.delete(oldest);
    placed.delete(oldest);
  }
  go({ upload: number, id: null });
}

$("file").addEventListener("change", () => {
  searchUpload($("file").files[0]);
  $("file").value = ""; // the same picture may be chosen again
});
const carriesFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
let depth = 0; // elements entered and not left
addEventListener("dragenter", (event) => {
  if (!carriesFiles(event)) return;
  depth += 1;
  $("overlay").hidden = false;
});
addEventListener("dragleave", () => {
  depth = Math.max(0, depth - 1);
  $("overlay").hidden = depth === 0;
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  depth = 0;
  $("overlay").hidden = true;
  searchUpload(event.dataTransfer?.files[0]);
});
addEventListener("paste", (event) => {
  const file = event.clipboardData?.files[0];
  if (!file) return;
  event.preventDefault();
  searchUpload(file);
});

// ---- settings and keys

$("k").addEventListener("change", () => go({ k: Number($("k").value) }));
$("settings").addEventListener("submit", (event) => event.preventDefault());

// The label box: a list of the labels that contain the typed text.

const MOST_LABELS = 50; // shown at once; there may be thousands
let active = -1; // the place of the highlighted one

function fittingLabels() { // those that start with the text come first
  const typed = $("label").value.trim().toLowerCase();
  const starts = [];
  const contains = [];
  for (const label of about.labels) {
    const place = label.name.toLowerCase().indexOf(typed);
    if (place >= 0) (place ? contains : starts).push(label);
  }
  return [...starts, ...contains];
}

function offerLabels() {
  const fitting = fittingLabels();
  const rows = fitting.slice(0, MOST_LABELS).map(({ name, items }, place) => {
    const swatch = make("i", { class: "swatch" });
    swatch.style.setProperty("--colour", colourOf(name));
    const row = make("li", { role: "option", id: `label-${place}`, "aria-selected": "false" }, swatch, make("span", {}, name), make("small", {}, counted(items, "picture", "pictures")));
    row.addEventListener("pointerdown", (event) => event.preventDefault()); // the box keeps the focus
    row.addEventListener("click", () => addLabel(name));
    return row;
  });
  const more = fitting.length - rows.length;
  if (!rows.length) rows.push(make("li", { class: "note" }, "No label contains this text."));
  if (more > 0) rows.push(make("li", { class: "note" }, `and ${more.toLocaleString("en")} more: type a part of the name`));
  $("labels").replaceChildren(...rows);
  showLabels(true);
}

function showLabels(open) {
  active = -1;
  $("labels").hidden = !open;
  $("label").setAttribute("aria-expanded", String(open));
  $("label").removeAttribute("aria-activedescendant");
}

function highlight(place) {
  const rows = [...$("labels").querySelectorAll("[role=option]")];
  if (!rows.length) return;
  active = (place + rows.length) % rows.length;
  rows.forEach((row, number) => row.setAttribute("aria-selected", String(number === active)));
  rows[active].scrollIntoView({ block: "nearest" });
  $("label").setAttribute("aria-activedescendant", rows[active].id);
}

function addLabel(name) {
  $("label").value = "";
  showLabels(false);
  if (!now().labels.includes(name)) go({ labels: [...now().labels, name] });
}

function enterLabel() { // the highlighted label, the one typed in full, or the only one that fits
  const text = $("label").value.trim();
  const fitting = fittingLabels();
  if (active >= 0) return addLabel(fitting[active].name);
  if (!text) return undefined;
  const whole = fitting.find(({ name }) => name === text) ?? fitting.find(({ name }) => name.toLowerCase() === text.toLowerCase());
  if (whole ?? fitting.length === 1) return addLabel((whole ?? fitting[0]).name);
  if (!fitting.length) return say(`There is no label “${text}”.`, { error: true });
  return say(`${counted(fitting.length, "label contains", "labels contain")} “${text}”: choose one from the list.`);
}

$("label").addEventListener("input", offerLabels);
$("label").addEventListener("click", offerLabels);
$("label").addEventListener("blur", () => showLabels(false));
$("label").addEventListener("keydown", (event) => {
  if (event.key === "Enter") return enterLabel();
  if (event.key === "Escape") {
    if ($("labels").hidden) $("label").value = "";
    return showLabels(false);
  }
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return undefined;
  event.preventDefault();
  if ($("labels").hidden) offerLabels();
  return highlight(active < 0 && event.key === "ArrowUp" ? -1 : active + (event.key === "ArrowDown" ? 1 : -1));
});

$("hits").addEventListener("keydown", (event) => {
  const links = [...$("hits").querySelectorAll("a")];
  const here = links.indexOf(document.activeElement);
  if (here < 0) return;
  if (event.key === "Escape") return $("file").focus();
  const next = neighbour(links, here, event.key);
  if (next === null) return;
  event.preventDefault();
  links[next].focus();
});

function neighbour(links, here, key) {
  if (key === "ArrowRight") return Math.min(here + 1, links.length - 1);
  if (key === "ArrowLeft") return Math.max(here - 1, 0);
  if (key === "Home") return 0;
  if (key === "End") return links.length - 1;
  if (key !== "ArrowDown" && key !== "ArrowUp") return null;
  const box = links[here].getBoundingClientRect();
  const down = key === "ArrowDown" ? 1 : -1;
  let best = here;
  let least = Infinity;
  links.forEach((link, place) => { // the nearest in the rows below or above
    const other = link.getBoundingClientRect();
    const away = down * (other.top - box.top);
    const distance = away + Math.abs(other.left - box.left);
    if (away > box.height / 2 && distance < least) [best, least] = [place, distance];
  });
  return best;
}

// ---- start

const map = new IndexMap({
  canvas: $("canvas"), state: $("map-state"), tip: $("tip"), spoken: $("map-point"), pictureURL, colourOf,
  choose: (id) => go({ id, upload: null }),
});
$("zoom-in").addEventListener("click", () => map.closer(1.6));
$("zoom-out").addEventListener("click", () => map.closer(1 / 1.6));
$("zoom-all").addEventListener("click", () => map.whole());
document.querySelector(".name").addEventListener("click", (event) => {
  event.preventDefault();
  go({ id: null, upload: null, labels: [] });
});
addEventListener("popstate", show);

async function start() {
  try {
    about = await ask("/api/about");
  } catch (error) {
    return say(error instanceof Sentence ? error.message : "Something went wrong in this page.", { error: true });
  }
  setClasses(about.labels.map((label) => label.name));
  document.title = `${about.name} · nearkin`;
  $("about").textContent = `${about.name}: ${counted(about.items, "picture", "pictures")}, ${counted(about.labels.length, "label", "labels")}`;
  document.querySelector(".only").hidden = about.labels.length === 0;
  if (!about.by_picture) {
    $("file").disabled = true;
    $("hint").textContent = `Uploaded pictures cannot be searched. ${about.by_picture_why ?? ""} You can search with any picture below and any point of the map.`;
  }
  if (early && about.by_picture) searchUpload(early);
  else show();
  map.load(ask);
}
start();
