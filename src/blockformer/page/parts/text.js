/* A text through the model: tokens, maps of attention, the words that each layer would say, norms. */
const told = data.text;
let chosen = { side: 0, place: 0 };
const color = () => {
  const probe = make("span", { class: "probe" });
  document.body.append(probe);
  const [red, green, blue] = getComputedStyle(probe).color.match(/\d+/g).map(Number);
  probe.remove();
  return [red, green, blue];
};

/* A deflated stream of bytes, in base64. */
async function unpacked(words) {
  const bytes = Uint8Array.from(atob(words), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function showTokens() {
  told.sides.forEach((side, index) => {
    const buttons = side.tokens.map((token, place) => make("button", { type: "button", "aria-pressed": "false", "aria-label": `token ${place}: ${token}`, on: { click: () => choose(index, place), focus: () => choose(index, place) } }, token));
    const words = told.sides.length > 1 ? { encoder: "The source", decoder: "What the decoder reads" }[side.name] : "Tokens";
    find("tokens").append(make("h3", {}, words), make("div", { class: "tokens", role: "group", "aria-label": words }, ...buttons));
    roving(buttons, () => 1);
    side.buttons = buttons;
  });
}

function choose(side, place) {
  chosen = { side, place };
  told.sides.forEach((one, index) => one.buttons.forEach((button, other) => button.setAttribute("aria-pressed", String(index === side && other === place))));
  showLens();
  showNorms();
}

function paint(canvas, bytes, start, rows, columns, ink) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const picture = context.createImageData(columns, rows);
  for (let cell = 0; cell < rows * columns; cell += 1) {
    picture.data.set(ink, 4 * cell);
    picture.data[4 * cell + 3] = Math.sqrt(bytes[start + cell] * 255);
  }
  context.putImageData(picture, 0, 0);
}

/* The tokens along a side of a map. Where they are too many to be read, some are hidden, never the chosen one. */
function axis(tokens, name, side) {
  const labels = tokens.map((token, place) => {
    const label = make("span", { title: `${place}: ${token}` }, token.trim() || token);
    label.style[side] = `${100 * (place + 0.5) / tokens.length}%`;
    return label;
  });
  const element = make("div", { class: `axis ${name}`, "aria-hidden": "true" }, ...labels);
  const fit = (pixels) => labels.forEach((label, place) => label.classList.toggle("hidden", place % Math.ceil(12 * tokens.length / pixels) !== 0));
  const mark = (place) => labels.forEach((label, other) => label.classList.toggle("here", other === place));
  return { element, fit, mark };
}

function showAttention(group, bytes) {
  const rows = told.sides[group.queries].tokens.length;
  const columns = told.sides[group.keys].tokens.length;
  const widest = Math.max(...group.heads);
  const grid = make("div", { class: "maps", role: "group", "aria-label": `${group.name}: a map for each layer and head` });
  const size = Math.max(14, Math.min(56, Math.floor(740 / widest)));
  grid.style.gridTemplateColumns = `auto repeat(${widest}, ${size}px)`;
  const large = make("canvas", { tabindex: "0", role: "img", id: "large-map" });
  const [above, left] = [axis(told.sides[group.keys].tokens, "columns", "left"), axis(told.sides[group.queries].tokens, "rows", "top")];
  const reading = make("p", { class: "reading", id: "reading", "aria-live": "polite" });
  const heading = make("h3", {}, "");
  const maps = [];
  let open = null;
  let cell = [0, 0];
  const value = (map, row, column) => bytes[map.start + row * columns + column] / 255;

  function enlarge(map) {
    open = map;
    paint(large, bytes, map.start, rows, columns, color());
    heading.textContent = `Layer ${map.layer}, head ${map.head}`;
    large.setAttribute("aria-label", `Attention of layer ${map.layer}, head ${map.head}; arrow keys move over it`);
    maps.forEach((other) => other.button.setAttribute("aria-pressed", String(other === map)));
    tell(...cell);
  }

  function tell(row, column) {
    cell = [row, column];
    left.mark(row);
    above.mark(column);
    const words = [told.sides[group.queries].tokens[row], told.sides[group.keys].tokens[column]];
    reading.replaceChildren(make("strong", {}, words[0]), ` (${row}) looks at `, make("strong", {}, words[1]), ` (${column}): `, make("span", { id: "value" }, value(open, row, column).toFixed(3)), " \u00b1 0.002");
  }

  let start = 0;
  group.heads.forEach((heads, layer) => {
    grid.append(make("span", { class: "row-name" }, `layer ${layer}`));
    for (let head = 0; head < widest; head += 1) {
      if (head >= heads) { grid.append(make("span")); continue; }
      const canvas = make("canvas", { "aria-hidden": "true" });
      paint(canvas, bytes, start, rows, columns, color());
      const map = { layer, head, start };
      map.button = make("button", { type: "button", class: "map", "aria-label": `layer ${layer}, head ${head}`, "aria-pressed": "false", on: { mouseenter: () => enlarge(map), focus: () => enlarge(map), click: () => enlarge(map) } }, canvas);
      map.button.style.height = `${Math.max(4, Math.round(size * rows / columns))}px`;
      canvas.style.height = "100%";
      maps.push(map);
      grid.append(map.button);
      start += rows * columns;
    }
  });
  roving(maps.map((map) => map.button), () => widest);
  large.addEventListener("mousemove", (event) => {
    const frame = large.getBoundingClientRect();
    const place = (offset, length, count) => Math.max(0, Math.min(count - 1, Math.floor(offset / length * count)));
    tell(place(event.clientY - frame.top, frame.height, rows), place(event.clientX - frame.left, frame.width, columns));
  });
  large.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    tell(Math.max(0, Math.min(rows - 1, cell[0] + step[0])), Math.max(0, Math.min(columns - 1, cell[1] + step[1])));
  });
  find("maps").replaceChildren(make("div", { class: "scroll" }, grid), make("div", { class: "large" }, heading, make("div", { class: "plot" }, above.element, left.element, large), reading));
  enlarge(maps[0]);
  above.fit(large.clientWidth);
  left.fit(large.clientHeight);
}

async function showMaps() {
  const buttons = told.maps.map((group) => make("button", { type: "button", on: { click: () => show(group) } }, group.name));
  find("attention").append(make("h3", {}, "Attention"), make("p", { class: "hint" }, "Each row is a token that attends, each column a token that it attends to. Point at a map or move with the arrow keys; point at the large one for a number."));
  if (buttons.length > 1) find("attention").append(make("div", { class: "kinds" }, ...buttons));
  find("attention").append(make("div", { id: "maps" }));
  async function show(group) {
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(told.maps[index] === group)));
    group.bytes = group.bytes || await unpacked(group.data);
    showAttention(group, group.bytes);
    document.body.dataset.ready = "true";
  }
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(told.maps.find((group, index) => buttons[index].getAttribute("aria-pressed") === "true")));
  await show(told.maps[0]);
}

function showLens() {
  const said = told.sides.findIndex((side) => side.lens);
  const head = [make("h3", {}, "What each layer would say"), make("p", { class: "hint" }, told.reads)];
  if (said < 0) { find("lens").replaceChildren(...head); return; }
  const side = told.sides[said];
  const place = chosen.side === said ? chosen.place : side.tokens.length - 1;
  const rows = side.lens.said.map((layer, index) => {
    const cells = [];
    for (let rank = 0; rank < layer[place].length; rank += 2) cells.push(make("span", {}, side.lens.words[layer[place][rank]], " ", make("span", { class: "share" }, `${(layer[place][rank + 1] / 100).toFixed(1)}%`)));
    return [index ? `layer ${index - 1}` : "embeddings", ...cells];
  });
  find("lens").replaceChildren(...head, make("p", {}, "At token ", make("strong", {}, `${place} ${side.tokens[place]}`)), table(["after", "1st", "2nd", "3rd", "4th", "5th"], rows, { class: "lens" }));
}

function showNorms() {
  const side = told.sides[chosen.side];
  const [width, height, left, bottom, top] = [720, 260, 58, 40, 12];
  const svg = (tag, attributes, words) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (words !== undefined) element.textContent = words;
    return element;
  };
  const all = side.norms.flat().filter((norm) => norm > 0);
  const [low, high] = [Math.log10(Math.min(...all)), Math.log10(Math.max(...all))];
  const x = (layer) => left + (width - left - 10) * layer / Math.max(side.norms.length - 1, 1);
  const y = (norm) => top + (height - bottom - top) * (1 - (Math.log10(Math.max(norm, 1e-9)) - low) / Math.max(high - low, 1e-6));
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": `Norms of the residual stream by layer, from ${Math.min(...all)} to ${Math.max(...all)}` });
  for (const share of [0, 0.5, 1]) {
    const norm = 10 ** (low + (high - low) * share);
    chart.append(svg("line", { x1: left, x2: width - 10, y1: y(norm), y2: y(norm), stroke: "var(--light)" }), svg("text", { x: left - 6, y: y(norm) + 4, "text-anchor": "end" }, norm.toPrecision(3)));
  }
  const line = (place, ink, wide) => svg("polyline", { points: side.norms.map((layer, index) => `${x(index).toFixed(1)},${y(layer[place]).toFixed(1)}`).join(" "), fill: "none", stroke: ink, "stroke-width": wide });
  side.tokens.forEach((token, place) => { if (place !== chosen.place) chart.append(line(place, "var(--light)", 1)); });
  chart.append(line(chosen.place, "var(--strong-blue)", 2.5));
  const step = Math.max(1, Math.ceil(side.norms.length / 12));
  for (let layer = 0; layer < side.norms.length; layer += step) chart.append(svg("text", { x: x(layer), y: height - 22, "text-anchor": "middle" }, layer ? String(layer - 1) : "emb."));
  chart.append(svg("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, "after layer"));
  const values = side.norms.map((layer) => layer[chosen.place]);
  find("norms").replaceChildren(make("h3", {}, "Norms of the residual stream"), make("p", { class: "hint" }, `A line for each token; in blue ${chosen.place}: ${side.tokens[chosen.place]}, from ${values[0]} after the embeddings to ${values[values.length - 1]} after the last layer.`), chart);
}

if (told) {
  find("text").hidden = false;
  find("text-note").textContent = told.note;
  showTokens();
  choose(told.sides.length - 1, told.sides[told.sides.length - 1].tokens.length - 1);
  showMaps();
}
