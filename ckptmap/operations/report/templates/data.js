"use strict";
// The data of the page, and what builds elements. Text from a checkpoint is only ever set as text.
const page = {};

page.find = (id) => document.getElementById(id);

page.make = (tag, classes, text) => {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  if (text !== undefined) made.textContent = text;
  return made;
};

page.draw = (tag, attributes, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
};

// Read when first asked for, after the page has been shown: there may be megabytes of it.
page.lazy = (name, make) => Object.defineProperty(page, name, {
  configurable: true,
  get: () => {
    const value = make();
    Object.defineProperty(page, name, { value });
    return value;
  },
});

page.lazy("data", () => JSON.parse(page.find("data").textContent));

page.count = (number) => number.toLocaleString("en-US");

page.counted = (number, noun) => `${page.count(number)} ${noun}${number === 1 ? "" : "s"}`;

page.human = (nbytes) => {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (nbytes < 1024) return unit === "B" ? `${nbytes} B` : `${nbytes.toFixed(1)} ${unit}`;
    nbytes /= 1024;
  }
  return `${nbytes.toFixed(1)} TiB`;
};

page.list = (values) => `[${values.join(", ")}]`;

// Names are stored as the segments that they share with the name before, and the rest.
page.lazy("names", () => {
  const { shared, tails } = page.data.tensors;
  const names = new Array(tails.length);
  let before = "";
  for (let i = 0; i < tails.length; i++) {
    let end = 0;
    for (let k = shared[i]; k > 0; k--) end = before.indexOf(".", end) + 1;
    before = names[i] = before.slice(0, end) + tails[i];
  }
  return names;
});

page.kind = (tensor) => page.data.tensors.kinds[page.data.tensors.kind[tensor]];

// The boxes that a page lists, by cell of the map and by tensor; made when first asked for.
page.lazy("boxes", () => {
  const [TENSOR, PART, FILE, FORM, OFFSET, REPLICA] = [0, 1, 2, 3, 4, 5];
  const map = page.data.map;
  const columns = map.boxes;
  let byTensor = null;
  const at = (i) => {
    const [offsets, sizes, nbytes] = map.forms[columns[FORM][i]];
    return {
      tensor: columns[TENSOR][i], part: map.parts[columns[PART][i]], file: map.files[columns[FILE][i]],
      offset: columns[OFFSET][i], replica: columns[REPLICA][i] === 1, offsets, sizes, nbytes,
    };
  };
  const ofTensor = (tensor) => {
    if (!byTensor) {
      byTensor = new Map();
      (columns[TENSOR] || []).forEach((owner, i) => {
        if (byTensor.has(owner)) byTensor.get(owner).push(i);
        else byTensor.set(owner, [i]);
      });
    }
    return byTensor.get(tensor) || [];
  };
  const table = (indices, withName) => {
    const made = page.make("table");
    const head = made.createTHead().insertRow();
    for (const title of [...(withName ? ["tensor"] : []), "box (offsets + sizes)", "file", "at byte", "bytes"]) {
      head.append(Object.assign(page.make("th", "", title), { scope: "col" }));
    }
    const body = made.createTBody();
    for (const i of indices) {
      const box = at(i);
      const row = body.insertRow();
      const name = page.names[box.tensor] + (box.part ? ` : ${box.part}` : "");
      if (withName) row.append(page.make("td", "", name));
      const where = `${page.list(box.offsets)} + ${page.list(box.sizes)}${box.replica ? " (replica)" : ""}`;
      row.append(page.make("td", "", (withName || !box.part ? "" : `${box.part}: `) + where));
      row.append(page.make("td", "", box.file), page.make("td", "", page.count(box.offset)));
      row.append(page.make("td", "", page.human(box.nbytes)));
    }
    return made;
  };
  return { ofTensor, table };
});
