// Copyright 2026 The hf_gr authors.
// SPDX-License-Identifier: Apache-2.0
// The page: what is asked, what is shown. Titles go into text, never into HTML.

import { beamsOf, drawTree, fit } from "./tree.js";

const $ = (id) => document.getElementById(id);
const SHOWN = 10, WAIT = 150; // items of the list; milliseconds between a key and a search
const history = []; // [{item_id, title}], the latest last
const removed = new Map(); // what was removed here, to be added again: {item_id, title, sequence}
let asked = 0, searched = 0, active = -1, timer = null;

// Requests ---------------------------------------------------------------------------------------------------------

async function send(method, path, body, key = "api-key") {
  const headers = { "content-type": "application/json" };
  const secret = $(key).value || $("api-key").value;
  if (secret) headers.authorization = `Bearer ${secret}`;
  let response;
  try {
    response = await fetch(`../${path}`, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    $("results").classList.add("stale");
    throw new Error("The server does not answer: is it still running?");
  }
  const answer = await response.json().catch(() => ({}));
  if (response.ok) return answer;
  if (response.status === 401 || response.status === 403) $("keys").hidden = false;
  const told = answer.error?.message ?? `${method} /${path} got ${response.status}`;
  throw new Error(answer.error?.fix && !told.includes(answer.error.fix) ? `${told}. ${answer.error.fix}` : told);
}

async function attempt(work) {
  try {
    const result = await work();
    $("error").hidden = true;
    return result;
  } catch (error) {
    $("error").textContent = error.message;
    $("error").hidden = false;
  }
}

const named = async (ids) => new Map((ids.length ? await send("POST", "page/titles", ids) : []).map((one) => [one.item_id, one]));

// Small pieces -----------------------------------------------------------------------------------------------------

function make(name, text, properties = {}) {
  const made = Object.assign(document.createElement(name), properties);
  if (text !== undefined) made.textContent = text;
  return made;
}

function row(text, ...more) {
  const line = make("li"), inside = make("div", undefined, { className: "row" });
  inside.append(make("span", text), ...more);
  line.append(inside);
  return line;
}

function button(text, label, act) {
  const made = make("button", text, { type: "button", title: label });
  made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

/** Replace a list; the focus stays at its place in it, or goes to the search where nothing is left. */
function fill(list, lines) {
  const old = [...list.children], place = old.findIndex((line) => line.contains(document.activeElement));
  const which = place < 0 ? -1 : [...old[place].querySelectorAll("button")].indexOf(document.activeElement);
  list.replaceChildren(...lines);
  if (place >= 0) (lines[Math.min(place, lines.length - 1)]?.querySelectorAll("button")[which] ?? $("search")).focus();
}

function sure(text) {
  $("sure-text").textContent = text;
  $("sure").returnValue = "no";
  $("sure").showModal();
  return new Promise((done) => $("sure").addEventListener("close", () => done($("sure").returnValue === "yes"), { once: true }));
}

const ms = (seconds) => `${(1e3 * seconds).toFixed(seconds < 0.0995 ? 1 : 0)} ms`;

// The answer -------------------------------------------------------------------------------------------------------

async function ask() {
  const number = ++asked;
  if (!history.length) return showNothing();
  $("items").setAttribute("aria-busy", "true");
  const items = history.map((one) => one.item_id);
  const beams = Math.max(2, Math.min(100, Number($("num-beams").value) || 20));
  const body = { history: items, num_beams: beams, num_results: beams, sequences: true };
  if ($("rule").value) body.rule = $("rule").value;
  if ($("exclude").checked) body.exclude = [...new Set(items)];
  const done = await attempt(async () => {
    const begun = performance.now();
    const answer = await send("POST", "v1/recommend", body);
    const seconds = (performance.now() - begun) / 1e3;
    const titles = await named([...new Set([...answer.items, ...(answer.dropped ?? [])])]);
    if (number === asked) show(answer, titles, seconds); // not what a later question has replaced
    return true;
  });
  if (number !== asked) return;
  $("results").classList.toggle("stale", !done); // of an earlier question
  $("items").setAttribute("aria-busy", "false");
}

function showNothing() {
  $("results").hidden = true;
  $("items").setAttribute("aria-busy", "false");
}

function show(answer, found, seconds) {
  const titles = new Map([...found].map(([item, one]) => [item, one.title]));
  const notes = [`Catalogue version ${answer.catalogue_version}`];
  if (answer.dropped?.length) notes.push(`not in the catalogue: ${answer.dropped.map((item) => titles.get(item)).join(", ")}`);
  if (answer.num_proven !== null) notes.push(`proven: the first ${answer.num_proven} of ${answer.items.length}`);
  if (answer.num_cut) notes.push(`${answer.num_cut} of the history were cut to fit the model`);
  if (!answer.items.length) notes.push("no item is allowed");
  $("notes").textContent = `${notes.join("; ")}.`;
  $("results").hidden = false;
  fill(
    $("items"),
    answer.items.slice(0, SHOWN).map((item, number) => {
      const title = titles.get(item), score = answer.scores?.[number];
      const one = { item_id: item, title, sequence: answer.sequences?.[number] ?? null };
      const line = row(title, make("span", score === undefined ? "" : score.toFixed(3), { className: "score" }));
      line.firstChild.append(button("+", `Add ${title} to the history`, () => add(one)));
      if (one.sequence) line.firstChild.append(button("remove", `Remove ${title} from the catalogue`, () => remove(one)));
      return line;
    }),
  );
  const beams = answer.scores && answer.sequences ? beamsOf(answer, titles) : [];
  $("tree").parentElement.hidden = !beams.length;
  $("tree").replaceChildren(drawTree(beams));
  if (beams.length) fit($("tree").firstChild);
  showTimes(answer, seconds);
}

function showTimes(answer, seconds) {
  const { total = 0, queued = 0, computed = 0 } = answer.seconds ?? {};
  const parts = [
    ["queue", "in the queue", queued],
    ["model", `in the model${answer.batch_size > 1 ? `, in a batch of ${answer.batch_size}` : ""}`, computed],
    ["server", "rest of the engine", Math.max(0, total - queued - computed)],
    ["network", "HTTP and browser", Math.max(0, seconds - total)],
  ];
  const bar = make("div", undefined, { className: "bar" }), legend = make("ul", undefined, { className: "legend" });
  for (const [name, text, part] of parts) {
    const piece = make("div", undefined, { className: name });
    piece.style.flex = `${1e6 * part} 0 0`; // shares below 1 in all would not fill the bar
    bar.append(piece);
    legend.append(make("li", `${text} ${ms(part)}`, { className: name }));
  }
  $("times").replaceChildren(bar, legend, make("p", `${ms(seconds)} in all`, { className: "hint" }));
}

// The history ------------------------------------------------------------------------------------------------------

function add(one) {
  history.push(one);
  showHistory();
  ask();
}

function showHistory() {
  $("history-empty").hidden = history.length > 0;
  fill(
    $("history"),
    history.map((one, number) =>
      row(
        one.title,
        button("×", `Remove ${one.title} from the history`, () => {
          history.splice(number, 1);
          showHistory();
          ask();
        }),
      ),
    ),
  );
}

function closeSearch() {
  clearTimeout(timer);
  ++searched;
  $("found").hidden = true;
  $("search").setAttribute("aria-expanded", "false");
  $("search").removeAttribute("aria-activedescendant");
  active = -1;
}

function select(number) {
  const lines = [...$("found").children];
  active = lines.length ? (number + lines.length) % lines.length : -1;
  lines.forEach((line, place) => line.setAttribute("aria-selected", String(place === active)));
  if (active < 0) return;
  $("search").setAttribute("aria-activedescendant", lines[active].id);
  lines[active].scrollIntoView({ block: "nearest" });
}

async function search() {
  const text = $("search").value.trim(), number = ++searched;
  if (!text) return closeSearch();
  const found = await attempt(() => send("GET", `page/items?${new URLSearchParams({ search: text })}`));
  if (!found || number !== searched) return;
  const lines = found.map((one, place) => {
    const line = make("li", one.title, { id: `found-${place}`, role: "option" });
    line.setAttribute("role", "option");
    line.classList.toggle("gone", !one.in_catalogue);
    line.addEventListener("mousedown", (event) => event.preventDefault()); // the box keeps the focus
    line.addEventListener("click", () => {
      $("search").value = "";
      closeSearch();
      add(one);
    });
    return line;
  });
  $("found").replaceChildren(...lines);
  $("found").hidden = !lines.length;
  $("search").setAttribute("aria-expanded", String(lines.length > 0));
  select(0);
}

// The catalogue ----------------------------------------------------------------------------------------------------

async function change(update) {
  const done = await attempt(async () => showCatalogue(await send("PATCH", "v1/catalogue", update, "admin-key")));
  if (done) ask();
  return done;
}

function showCatalogue(state) {
  $("catalogue").textContent = `${state.num_items.toLocaleString("en")} items, version ${state.version}`;
  const chosen = $("rule").value, names = Object.keys(state.rules);
  $("rule").replaceChildren(make("option", "none", { value: "" }), ...names.map((name) => make("option", name, { value: name })));
  $("rule").value = names.includes(chosen) ? chosen : "";
  fill(
    $("rules"),
    names.map((name) =>
      row(
        `${name}: ${state.rules[name].toLocaleString("en")} items`,
        button("delete", `Delete the rule ${name}`, () => change({ rules: { [name]: null } })),
      ),
    ),
  );
  return state;
}

async function remove(one) {
  if (!(await sure(`Remove ${one.title} from the catalogue, for all who use this server?`))) return;
  if (await change({ remove: [one.item_id] })) removed.set(one.item_id, one);
  showRemoved();
}

function showRemoved() {
  $("removed-empty").hidden = removed.size > 0;
  fill(
    $("removed"),
    [...removed.values()].map((one) =>
      row(
        one.title,
        button("add again", `Add ${one.title} again`, async () => {
          if (await change({ add: [{ item_id: one.item_id, sequence: one.sequence }] })) removed.delete(one.item_id);
          showRemoved();
        }),
      ),
    ),
  );
}

async function makeRule() {
  const name = $("rule-name").value.trim(), words = $("rule-words").value.trim();
  const found = await attempt(async () => {
    const items = await send("GET", `page/items?${new URLSearchParams({ search: words, limit: 10000 })}`);
    const living = items.filter((one) => one.in_catalogue).map((one) => one.item_id);
    if (!living.length) throw new Error(`No title has “${words}”, expected at least one: try another word.`);
    return living;
  });
  if (!found || !(await attempt(async () => showCatalogue(await send("PATCH", "v1/catalogue", { rules: { [name]: found } }, "admin-key"))))) return;
  $("rule").value = name;
  $("make-rule").reset();
  ask();
}

const load = () => attempt(async () => showCatalogue(await send("GET", "v1/catalogue")));

$("search").addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(search, WAIT);
});
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Escape") closeSearch();
  if ($("found").hidden) return;
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    select(active + (event.key === "ArrowDown" ? 1 : -1));
  }
  if (event.key === "Enter" && active >= 0) {
    event.preventDefault();
    $("found").children[active].click();
  }
});
$("search").addEventListener("blur", closeSearch);
for (const id of ["num-beams", "rule", "exclude"]) $(id).addEventListener("change", ask);
$("make-rule").addEventListener("submit", (event) => {
  event.preventDefault();
  makeRule();
});
$("keys").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (await load()) {
    $("keys").hidden = true;
    ask();
  }
});
showHistory();
load();
