// The tree of modules: a treegrid of which only the rows in view are in the document.
page.tree = (() => {
  const OVERSCAN = 8;
  const TITLES = { model: "weights", optimizer: "optimizer state", other: "other tensors" };
  const host = page.find("tree");
  const detail = page.find("tensor-detail");
  const found = page.find("found");
  let root, visible = [], active = 0, matching = null;

  const node = (title, depth) =>
    ({ title, depth, children: null, tensor: -1, count: 0, nbytes: 0, dtype: "", encoding: "", open: false, match: 0, parent: null });

  function child(parent, title) {
    if (!parent.children) parent.children = new Map();
    let made = parent.children.get(title);
    if (!made) {
      made = node(title, parent.depth + 1);
      made.parent = parent;
      parent.children.set(title, made);
    }
    return made;
  }

  function namesake(one, i) {
    const made = node(one.title, one.depth);
    made.parent = one.parent;
    one.parent.children.set(`${one.title} ${i}`, made);
    return made;
  }

  function build() {
    const { kinds, kind } = page.data.tensors;
    const roles = new Set(kind.map((k) => kinds[k][0]));
    const top = node("", -1);
    const heads = new Map();
    for (const role of roles) heads.set(role, roles.size > 1 ? child(top, TITLES[role]) : top);
    // What a name shares with the one before it stands in the data: only its tail is looked up.
    const { shared, tails } = page.data.tensors;
    let stack = [];
    for (let i = 0; i < tails.length; i++) {
      const head = heads.get(kinds[kind[i]][0]);
      let segments = tails[i].split(".");
      if (stack[0] === head) stack.length = shared[i] + 1;
      else {
        stack = [head];
        segments = page.names[i].split(".");
      }
      for (const segment of segments) stack.push(child(stack[stack.length - 1], segment));
      let leaf = stack[stack.length - 1];
      if (leaf.tensor >= 0) leaf = namesake(leaf, i); // two names that are shown alike
      leaf.tensor = i;
    }
    add(top);
    return top;
  }

  // Count what lies below; join a module that has one child only with it; order numbered children.
  function add(parent) {
    if (parent.tensor >= 0) {
      parent.count = 1;
      [, , parent.dtype, parent.encoding, parent.nbytes] = page.kind(parent.tensor);
    }
    if (!parent.children) return;
    let children = [...parent.children.values()];
    if (children.every((one) => /^\d+$/.test(one.title))) children.sort((a, b) => a.title - b.title);
    parent.children = children;
    for (const one of children) add(one);
    parent.children = children = children.map((one) => joined(one, parent));
    for (const one of children) {
      parent.count += one.count;
      parent.nbytes += one.nbytes;
      for (const field of ["dtype", "encoding"]) {
        if (!parent[field]) parent[field] = one[field];
        else if (parent[field] !== one[field]) parent[field] = "mixed";
      }
    }
  }

  function joined(one, parent) {
    const nameless = Object.values(TITLES).includes(one.title) && one.depth === 0;
    if (nameless || one.tensor >= 0 || !one.children || one.children.length !== 1) return one;
    const only = one.children[0];
    only.title = `${one.title}.${only.title}`;
    only.parent = parent;
    return only;
  }

  function flatten() {
    visible = [];
    const walk = (parent, depth) => {
      const shown = matching ? parent.children.filter((one) => one.match > 0) : parent.children;
      shown.forEach((one, i) => {
        one.depth = depth;
        one.place = i + 1;
        one.siblings = shown.length;
        visible.push(one);
        if (one.children && (matching || one.open)) walk(one, depth + 1);
      });
    };
    if (root.children) walk(root, 0);
    active = Math.min(active, Math.max(0, visible.length - 1));
  }

  const space = page.make("div", "space");
  const height = () => parseFloat(getComputedStyle(host).getPropertyValue("--row"));

  function describe(one) {
    const shape = one.tensor < 0 ? "" : page.list(page.kind(one.tensor)[1]);
    return { shape, dtype: one.dtype, encoding: one.encoding };
  }

  function cell(classes, text, column) {
    const made = page.make("span", classes, text);
    made.setAttribute("role", "gridcell");
    made.setAttribute("aria-colindex", column);
    return made;
  }

  function draw(one, i, tall) {
    const row = page.make("div", i === active ? "row active" : "row");
    row.setAttribute("role", "row");
    row.id = `row-${i}`;
    row.setAttribute("aria-rowindex", i + 2);
    row.setAttribute("aria-level", one.depth + 1);
    row.setAttribute("aria-setsize", one.siblings);
    row.setAttribute("aria-posinset", one.place);
    row.setAttribute("aria-selected", String(i === active));
    if (one.children) row.setAttribute("aria-expanded", String(Boolean(matching || one.open)));
    row.style.transform = `translateY(${i * tall}px)`;
    const { shape, dtype, encoding } = describe(one);
    const name = cell("indent", "", 1);
    name.style.setProperty("--depth", one.depth);
    const twist = page.make("span", "twist", one.children ? (matching || one.open ? "▾" : "▸") : "");
    twist.setAttribute("aria-hidden", "true");
    const title = page.make("bdi", "", one.title || "(no name)");
    name.append(twist, title);
    if (one.children) name.append(page.make("span", "soft", `  ${page.count(one.count)}`));
    name.append(page.make("span", "under", [encoding === "dense" ? "" : encoding, dtype, shape].filter(Boolean).join(" · ")));
    name.title = one.title;
    const size = cell("number", page.human(one.nbytes), 5);
    const weight = page.make("span", "weight");
    weight.style.width = `${Math.sqrt(one.nbytes / (root.nbytes || 1)) * 100}%`;
    size.append(weight);
    row.append(name, cell("shape", shape, 2), cell("dtype", dtype, 3), cell("encoding soft", encoding, 4), size);
    return row;
  }

  let drawn = null;
  function paint(force) {
    const tall = height();
    const first = Math.max(0, Math.floor(host.scrollTop / tall) - OVERSCAN);
    const last = Math.min(visible.length, Math.ceil((host.scrollTop + host.clientHeight) / tall) + OVERSCAN);
    if (!force && drawn && drawn[0] === first && drawn[1] === last) return;
    drawn = [first, last];
    space.style.height = `${visible.length * tall}px`;
    host.style.height = `min(62vh, ${Math.max(4, visible.length + 1) * tall + 4}px)`;
    const rows = [];
    for (let i = first; i < last; i++) rows.push(draw(visible[i], i, tall));
    space.replaceChildren(...rows);
    host.setAttribute("aria-rowcount", visible.length + 1);
    if (active >= first && active < last) host.setAttribute("aria-activedescendant", `row-${active}`);
    else host.removeAttribute("aria-activedescendant");
  }

  function path(one) {
    const titles = [];
    for (let at = one; at && at !== root; at = at.parent) titles.unshift(at.title);
    return titles.join(" › ");
  }

  function tell(one) {
    detail.hidden = false;
    detail.replaceChildren();
    const { dtype, encoding } = describe(one);
    if (one.tensor < 0) {
      const text = `${page.counted(one.count, "tensor")}, ${page.human(one.nbytes)}, ${dtype} ${encoding}`;
      detail.append(page.make("p", "name", path(one)), page.make("p", "", text));
      return;
    }
    const [role, shape] = page.kind(one.tensor);
    const own = page.kind(one.tensor);
    detail.append(page.make("p", "name", page.names[one.tensor]));
    detail.append(page.make("p", "", `${TITLES[role]} · ${page.list(shape)} · ${own[2]} · ${own[3]} · ${page.human(own[4])}`));
    const boxes = page.boxes.ofTensor(one.tensor);
    if (boxes.length) detail.append(page.boxes.table(boxes.slice(0, 64), false));
    if (boxes.length > 64) detail.append(page.make("p", "hint", `and ${page.count(boxes.length - 64)} more`));
    if (!boxes.length) detail.append(page.make("p", "hint", "Its boxes are not listed here; ckptmap inspect --shards has all."));
  }

  function select(i) {
    if (!visible.length) return;
    active = Math.max(0, Math.min(visible.length - 1, i));
    const tall = height();
    const head = tall;
    if (active * tall < host.scrollTop) host.scrollTop = active * tall;
    const bottom = (active + 1) * tall + head;
    if (bottom > host.scrollTop + host.clientHeight) host.scrollTop = bottom - host.clientHeight;
    paint(true);
    tell(visible[active]);
  }

  function toggle(one, open) {
    if (!one.children || matching) return;
    one.open = open;
    flatten();
    paint(true);
  }

  function keys(event) {
    const one = visible[active];
    if (!one || event.ctrlKey || event.metaKey || event.altKey) return;
    const many = Math.max(1, Math.floor(host.clientHeight / height()) - 2);
    const moves = { ArrowDown: active + 1, ArrowUp: active - 1, Home: 0, End: visible.length - 1, PageDown: active + many, PageUp: active - many };
    if (event.key in moves) select(moves[event.key]);
    else if (event.key === "ArrowRight" && one.children && !one.open && !matching) toggle(one, true);
    else if (event.key === "ArrowRight" && one.children) select(active + 1);
    else if (event.key === "ArrowLeft" && one.children && one.open && !matching) toggle(one, false);
    else if (event.key === "ArrowLeft" && one.parent !== root) select(visible.indexOf(one.parent));
    else if (event.key === "Enter" || event.key === " ") { toggle(one, !one.open); tell(one); }
    else return;
    event.preventDefault();
  }

  function search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    matching = words.length ? words : null;
    let hits = 0;
    const texts = page.data.tensors.kinds.map((k) => ` ${k[0]} ${k[2]} ${k[3]} [${k[1].join(", ")}] [${k[1].join(",")}]`);
    const mark = (one) => {
      one.match = 0;
      if (one.tensor >= 0) {
        const full = (page.names[one.tensor] + texts[page.data.tensors.kind[one.tensor]]).toLowerCase();
        one.match = words.every((word) => full.includes(word)) ? 1 : 0;
        hits += one.match;
      }
      for (const below of one.children || []) one.match += mark(below);
      return one.match;
    };
    if (matching) mark(root);
    found.textContent = matching ? `${page.counted(hits, "tensor")} found` : "";
    active = 0;
    host.scrollTop = 0;
    flatten();
    paint(true);
  }

  function header() {
    const row = page.make("div", "row head-row");
    row.setAttribute("role", "row");
    row.setAttribute("aria-rowindex", 1);
    ["name", "shape", "dtype", "encoding", "bytes"].forEach((title, i) => {
      const made = page.make("span", i === 4 ? "number" : title, title);
      made.setAttribute("role", "columnheader");
      made.setAttribute("aria-colindex", i + 1);
      row.append(made);
    });
    row.style.position = "sticky";
    return row;
  }

  function start() {
    root = build();
    let shown = 0;
    for (let at = root; at && at.children && (shown += at.children.length) < 100; at = at.children.find((one) => one.children)) at.open = true;
    flatten();
    host.setAttribute("role", "treegrid");
    host.setAttribute("aria-label", "Modules and tensors");
    host.setAttribute("aria-colcount", 5);
    host.tabIndex = 0;
    host.hidden = false;
    page.find("tree-tools").hidden = false;
    const head = page.make("div", "head-group");
    head.setAttribute("role", "rowgroup");
    head.append(header());
    space.setAttribute("role", "rowgroup");
    host.append(head, space);
    host.addEventListener("scroll", () => requestAnimationFrame(() => paint(false)), { passive: true });
    host.addEventListener("keydown", keys);
    host.addEventListener("click", (event) => {
      const row = event.target.closest("[role=row][id]");
      if (!row) return;
      const i = Number(row.id.slice(4));
      const again = i === active && !detail.hidden;
      const one = visible[i];
      select(i);
      if (one.children && (event.target.className === "twist" || again || !one.open)) toggle(one, !one.open);
    });
    let waiting = 0;
    page.find("search").addEventListener("input", (event) => {
      clearTimeout(waiting);
      waiting = setTimeout(() => search(event.target.value), 120);
    });
    addEventListener("resize", () => paint(true));
    paint(true);
  }
  return { start };
})();
