// Copyright 2026 The hf_gr authors.
// SPDX-License-Identifier: Apache-2.0
// Beams as a tree: sequences of tokens that begin alike share branches. Knows no server.

const SVG = "http://www.w3.org/2000/svg";
const ROW = 24, COLUMN = 92, LEFT = 24, TOP = 16, LABEL = 420, LONGEST = 52;

/** A tree of beams [{tokens, score, names}], the best first; children are in the order of their best beam. */
export function makeTree(beams) {
  const root = { token: null, depth: 0, children: new Map(), beams: [], best: -Infinity };
  for (const beam of beams) {
    let node = root;
    node.beams.push(beam);
    node.best = Math.max(node.best, beam.score);
    for (const token of beam.tokens) {
      if (!node.children.has(token))
        node.children.set(token, { token, depth: node.depth + 1, children: new Map(), beams: [], best: -Infinity });
      node = node.children.get(token);
      node.beams.push(beam);
      node.best = Math.max(node.best, beam.score);
    }
  }
  return root;
}

/** Beams from an answer with sequences: items that share a sequence are one beam. */
export function beamsOf(answer, titles) {
  const beams = new Map();
  answer.items.forEach((item, number) => {
    const tokens = answer.sequences[number];
    if (tokens === null) return; // it left the catalogue meanwhile
    const key = tokens.join(" ");
    if (!beams.has(key)) beams.set(key, { tokens, score: answer.scores[number], names: [], rank: beams.size + 1 });
    beams.get(key).names.push(titles.get(item) ?? String(item));
  });
  return [...beams.values()];
}

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Give nodes their places; the height in rows. */
function place(node, row) {
  if (node.children.size === 0) {
    node.row = row;
    return row + 1;
  }
  for (const child of node.children.values()) row = place(child, row);
  const rows = [...node.children.values()].map((child) => child.row);
  node.row = (rows[0] + rows.at(-1)) / 2;
  return row;
}

/** An SVG of the beams. */
export function drawTree(beams) {
  const root = makeTree(beams);
  const rows = place(root, 0);
  const levels = Math.max(0, ...beams.map((beam) => beam.tokens.length));
  const width = LEFT + levels * COLUMN + LABEL, height = 2 * TOP + rows * ROW;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
  svg.setAttribute("aria-label", `${beams.length} beams as a tree`);
  const worst = Math.min(...beams.map((beam) => beam.score));
  const strength = (node) => (root.best === worst ? 1 : (node.best - worst) / (root.best - worst));
  const x = (node) => LEFT + node.depth * COLUMN, y = (node) => TOP + (node.row + 0.5) * ROW;
  const links = element("g", { class: "links" }), nodes = element("g", { class: "nodes" });
  svg.append(links, nodes);

  function draw(node) {
    for (const child of node.children.values()) {
      const middle = (x(node) + x(child)) / 2;
      const d = `M${x(node)},${y(node)} C${middle},${y(node)} ${middle},${y(child)} ${x(child)},${y(child)}`;
      const much = strength(child);
      links.append(element("path", { d, "stroke-width": 1 + 4 * much, "stroke-opacity": 0.3 + 0.6 * much }));
      draw(child);
    }
    const group = element("g", { transform: `translate(${x(node)},${y(node)})` });
    const many = node.beams.length === 1 ? "1 beam" : `${node.beams.length} beams`;
    group.append(element("title", {}, `${node.token === null ? "start" : `token ${node.token}`}: ${many}, best score ${node.best.toFixed(3)}`));
    group.append(element("circle", { r: 4 }));
    if (node.token !== null && node.children.size) group.append(element("text", { class: "token", x: 0, y: -7 }, node.token));
    if (node.children.size === 0) {
      const beam = node.beams[0], all = beam.names.join(" / ");
      const label = all.length > LONGEST ? `${all.slice(0, LONGEST - 1)}…` : all;
      const text = element("text", { class: "leaf", x: 10, y: 4 });
      text.append(element("tspan", { class: "token" }, `${node.token}  `), element("tspan", { class: "score", dx: 4 }, beam.score.toFixed(3)));
      text.append(element("tspan", { dx: 8 }, label)); // last, since it may be long
      group.append(text);
    }
    nodes.append(group);
  }
  if (beams.length) draw(root);
  return svg;
}

/** Make a tree on the page as wide as its longest title. */
export function fit(svg) {
  const { x, width } = svg.getBBox(), { height } = svg.viewBox.baseVal, most = Math.ceil(x + width) + 8;
  svg.setAttribute("viewBox", `0 0 ${most} ${height}`);
  svg.setAttribute("width", most);
}
