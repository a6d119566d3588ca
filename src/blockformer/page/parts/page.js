"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);

/* An element with attributes, text and children. Words only ever enter as text: many come from other people's files. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function table(heads, rows, attributes = {}) {
  const head = heads.length ? make("thead", {}, make("tr", {}, ...heads.map((word) => make("th", { scope: "col" }, word)))) : null;
  const cells = (row) => row.map((cell) => (cell instanceof Node ? make("td", {}, cell) : make("td", {}, String(cell))));
  return make("div", { class: "scroll" }, make("table", attributes, head, make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells(row))))));
}

const units = ["", " k", " M", " G", " T", " P"];
function short(count) {
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${Number(count.toPrecision(3)).toLocaleString("en")}${units[unit]}`;
}
function inBytes(count) {
  const names = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < names.length - 1) { count /= 1024; unit += 1; }
  return `${unit ? count.toFixed(1) : count} ${names[unit]}`;
}
const exact = (count) => count.toLocaleString("en");

/* Arrow keys, Home and End move among elements of which one is reached by Tab. */
function roving(elements, columns) {
  elements.forEach((element, index) => {
    element.tabIndex = index ? -1 : 0;
    element.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(index), ArrowUp: -columns(index), Home: -index, End: elements.length - 1 - index };
      if (!(event.key in steps)) return;
      event.preventDefault();
      const next = elements[index + steps[event.key]];
      if (!next) return;
      elements.forEach((other) => { other.tabIndex = -1; });
      next.tabIndex = 0;
      next.focus();
    });
  });
}

function showHead() {
  find("name").textContent = data.name;
  find("sentence").textContent = data.sentence;
  for (const [name, value, word] of data.totals) {
    find("totals").append(make("div", {}, make("dt", {}, name), make("dd", { class: "value" }, value), make("dd", { class: "word" }, word)));
  }
  for (const note of data.notes) find("notes").append(make("li", {}, note));
  const rows = [];
  for (const [group, fields] of Object.entries(data.settings)) for (const [name, value] of Object.entries(fields)) rows.push([group, make("code", {}, name), value]);
  find("settings").append(table(["group", "field", "value"], rows));
}

const byPath = new Map(data.boxes.map((box) => [box.path, box]));

function facts(box) {
  const count = box.layers.length;
  const rows = [["parameters", exact(box.parameters), short(box.parameters * Math.max(count, 1))], ["memory", inBytes(box.bytes), inBytes(box.bytes * Math.max(count, 1))]];
  if (data.shared && count) for (const row of rows) row[2] = `${row[1]}, shared`;
  rows.push([`FLOPs for ${data.words}`, short(box.flops), short(box.flops * Math.max(count, 1))]);
  if ("stepFlops" in box) rows.push(["FLOPs for one more token", short(box.stepFlops), short(box.stepFlops * Math.max(count, 1))]);
  if ("cache" in box) rows.push([`cache for a ${box.role.endsWith("cross_attn") ? "source token" : "token"}`, inBytes(box.cache), inBytes(box.cache * Math.max(count, 1))]);
  if ("state" in box) rows.push(["state for a text", inBytes(box.state), inBytes(box.state * Math.max(count, 1))]);
  return count > 1 ? table(["", "a layer", `all ${count} of this kind`], rows, { class: "numbers" }) : table([], rows.map((row) => row.slice(0, 2)), { class: "numbers" });
}

function openBox(path, moves = true) {
  const box = byPath.get(path);
  document.querySelectorAll(".box").forEach((group) => {
    const open = group.dataset.path === path;
    group.classList.toggle("open", open);
    group.setAttribute("aria-pressed", String(open));
  });
  const panel = find("panel");
  panel.replaceChildren(
    make("h3", {}, box.title),
    make("p", { class: "word" }, [box.size, ...box.chips].filter(Boolean).join(" · ")),
    make("p", {}, "Code: ", make("code", {}, box.code), make("br"), "Module: ", make("code", {}, box.path)),
  );
  const different = data.beside ? data.beside.boxes[box.path] : undefined;
  if (different) panel.append(make("div", { class: "different" }, make("strong", {}, `Different from ${data.beside.name}`), ...different.map((words) => make("p", {}, words))));
  panel.append(make("h4", {}, "Weights, memory, operations"), facts(box));
  panel.append(make("h4", {}, `Shapes for ${data.words}`), table(["", "reads", "writes"], box.shapes.map(([name, read, wrote]) => [make("code", {}, name || "the box"), read, wrote]), { class: "numbers" }));
  const isOff = ([, value]) => ["None", "False", "0"].includes(value);
  const rows = (fields) => table([], fields.map(([name, value, meaning]) => [make("div", {}, make("code", {}, name), make("div", { class: "word" }, meaning)), value]), { class: "fields" });
  const [on, off] = [box.fields.filter((field) => !isOff(field)), box.fields.filter(isOff)];
  if (on.length) panel.append(make("h4", {}, "Fields of the config that steer it"), rows(on));
  if (off.length) panel.append(make("details", {}, make("summary", {}, `${off.length} more that are off`), rows(off)));
  if (moves && window.matchMedia("(max-width: 900px)").matches) panel.scrollIntoView({ block: "nearest" });
}

function showFigures() {
  const figures = [...find("figures").children];
  find("figures").classList.toggle("wide", data.wide);
  const buttons = data.figures.map((label, index) => make("button", { type: "button", "aria-pressed": String(index === 0), on: { click: () => show(index) } }, label));
  function show(index) {
    figures.forEach((figure, other) => { figure.hidden = other !== index; });
    buttons.forEach((button, other) => button.setAttribute("aria-pressed", String(other === index)));
  }
  if (figures.length > 1) {
    find("kinds").append(...buttons);
    find("kinds-hint").textContent = "Layers differ: choose which are opened.";
  }
  for (const svg of document.querySelectorAll("#figures svg")) svg.setAttribute("role", "group");
  for (const group of document.querySelectorAll(".box")) {
    group.setAttribute("tabindex", "0");
    group.setAttribute("role", "button");
    group.addEventListener("click", () => openBox(group.dataset.path));
    group.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      openBox(group.dataset.path);
    });
  }
  show(0);
  openBox((data.boxes.find((box) => box.kind === "attention") || data.boxes[0]).path, false);
}

function showBeside() {
  if (!data.beside) return;
  find("beside").hidden = false;
  find("beside-heading").textContent = `Differences from ${data.beside.name}`;
  find("beside-hint").textContent = `The sign \u2260 marks a box that is built differently in ${data.beside.name}.`;
  const rows = data.beside.rows.map(([title, words]) => [make("strong", {}, title), words]);
  find("beside-rows").append(rows.length ? table(["box", "difference"], rows) : make("p", {}, "Only sizes differ: every box is built the same way."));
  if (data.beside.missing.length) find("beside-rows").append(make("p", {}, `Boxes of ${data.beside.name} that are not here: ${data.beside.missing.join(", ")}.`));
  if (data.beside.sizes.length) find("beside-rows").append(make("h3", {}, "Sizes"), table(["field", "here", data.beside.name], data.beside.sizes.map(([name, ours, theirs]) => [make("code", {}, name), ours, theirs])));
}

showHead();
showFigures();
showBeside();
