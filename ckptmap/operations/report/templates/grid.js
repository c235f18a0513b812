// A heat map: rows x columns, nine levels, one SVG path a level. One cell at a time is a grid cell of
// the document: the one under the pointer, or that the arrow keys have reached.
page.grid = (host, spec) => {
  const LEVELS = 9;
  const NARROW = 11, WIDE = 46;
  const detail = page.make("div", "detail", spec.hint);
  detail.setAttribute("aria-live", "polite");
  const frame = page.make("div", "frame");
  const titles = page.make("div", "titles");
  const pane = page.make("div", "pane");
  const inner = page.make("div");
  const cursor = page.make("div", "cursor");
  const label = page.make("span", "out");
  const scale = page.make("p", "scale");
  let at = null, wide = NARROW, tall = 20, top = 20;

  function sizes() {
    const room = Math.max(120, host.clientWidth - Math.min(260, titles.scrollWidth + 14 || 200));
    wide = Math.max(NARROW, Math.min(WIDE, Math.floor(room / Math.max(1, spec.columns.length))));
    tall = spec.rows.length > 64 ? 10 : spec.rows.length > 24 ? 16 : 22;
  }

  function axis(svg) {
    // Long titles stand upright, short ones lie; as many as there is room for.
    const short = spec.columns.map((title) => spec.shorten(title));
    const longest = Math.max(1, ...short.map((title) => title.length)) * 6.8;
    const upright = longest > wide;
    top = upright ? Math.min(150, longest + 8) : 20;
    const every = Math.max(1, Math.ceil((upright ? 14 : longest + 6) / wide));
    short.forEach((title, i) => {
      if (i % every) return;
      const x = i * wide + wide / 2;
      const place = upright ? { x: 0, y: 0, transform: `translate(${x + 4} ${top - 6}) rotate(-90)` } : { x, y: top - 6, "text-anchor": "middle" };
      svg.append(page.draw("text", { class: "tick", ...place }, title.length > 21 ? `${title.slice(0, 20)}…` : title));
    });
  }

  function paint() {
    if (spec.begin) spec.begin();
    sizes();
    const svg = page.draw("svg", { "aria-hidden": "true" });
    axis(svg);
    const width = spec.columns.length * wide, height = spec.rows.length * tall;
    const gap = tall > 12 ? 2 : 1;
    const levels = Array.from({ length: LEVELS }, () => []);
    const hatched = [];
    for (const [key, cell] of spec.cells) {
      const row = Math.floor(key / spec.columns.length), column = key % spec.columns.length;
      const x = column * wide, y = top + row * tall;
      levels[spec.level(cell)].push(`M${x} ${y}h${wide - gap}v${tall - gap}h${gap - wide}z`);
      if (spec.hatched && spec.hatched(cell)) {
        for (let k = 4; k < wide + tall - 2 * gap; k += 7) {
          const a = Math.max(0, k - (wide - gap)), b = Math.min(tall - gap, k);
          hatched.push(`M${x + k - a} ${y + a}L${x + k - b} ${y + b}`);
        }
      }
    }
    levels.forEach((parts, i) => parts.length && svg.append(page.draw("path", { class: `c${i}`, d: parts.join("") })));
    if (hatched.length) svg.append(page.draw("path", { class: "hatch", d: hatched.join("") }));
    svg.setAttribute("width", width);
    svg.setAttribute("height", top + height);
    inner.style.width = `${width}px`;
    inner.replaceChildren(svg, ...(at ? [holder] : []));
    titles.replaceChildren(...spec.rows.map((title, i) => {
      const made = page.make("div", "", title);
      made.title = title;
      made.style.height = made.style.lineHeight = `${tall}px`;
      made.style.fontSize = `${Math.min(12, tall - 1)}px`;
      if (spec.total) made.append(page.make("b", "", spec.total(i)));
      return made;
    }));
    legend();
    if (at) move(at[0], at[1], false);
  }

  function legend() {
    const steps = page.draw("svg", { viewBox: `0 0 ${LEVELS * 16} 10`, "aria-hidden": "true" });
    for (let i = 0; i < LEVELS; i++) steps.append(page.draw("rect", { class: `c${i}`, x: i * 16, width: 16, height: 10 }));
    const [low, high, remark] = spec.range();
    scale.replaceChildren(page.make("span", "", low), steps, page.make("span", "", high));
    if (remark) scale.append(page.make("span", "", `· ${remark}`));
  }

  const holder = page.make("div");
  holder.setAttribute("role", "row");
  cursor.setAttribute("role", "gridcell");
  page.grids = (page.grids || 0) + 1;
  cursor.id = `grid-${page.grids}-cell`;
  cursor.append(label);
  holder.append(cursor);

  function move(row, column, scroll) {
    at = [row, column];
    if (!holder.isConnected) inner.append(holder);
    cursor.style.transform = `translate(${column * wide}px, ${top + row * tall}px)`;
    cursor.style.width = `${wide - 2}px`;
    cursor.style.height = `${tall - 2}px`;
    holder.setAttribute("aria-rowindex", row + 1);
    cursor.setAttribute("aria-colindex", column + 1);
    pane.setAttribute("aria-activedescendant", cursor.id);
    const cell = spec.cells.get(row * spec.columns.length + column);
    const shown = spec.describe(row, column, cell);
    label.textContent = shown.title;
    detail.replaceChildren(page.make("p", "name", shown.title), ...shown.below);
    if (!scroll) return;
    const left = column * wide;
    if (left < pane.scrollLeft) pane.scrollLeft = left;
    if (left + wide > pane.scrollLeft + pane.clientWidth) pane.scrollLeft = left + wide - pane.clientWidth;
  }

  function pointed(event) {
    const box = inner.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / wide), row = Math.floor((event.clientY - box.top - top) / tall);
    if (row < 0 || column < 0 || row >= spec.rows.length || column >= spec.columns.length) return;
    if (!at || at[0] !== row || at[1] !== column) move(row, column, false);
  }

  function keys(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [row, column] = at || [0, -1];
    const moves = {
      ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], ArrowUp: [row - 1, column], ArrowDown: [row + 1, column],
      Home: [row, 0], End: [row, spec.columns.length - 1],
    };
    if (!(event.key in moves)) return;
    const [down, right] = moves[event.key];
    event.preventDefault();
    move(Math.max(0, Math.min(spec.rows.length - 1, down)), Math.max(0, Math.min(spec.columns.length - 1, right)), true);
  }

  if (spec.title) host.append(page.make("h3", "", spec.title));
  pane.tabIndex = 0;
  pane.setAttribute("role", "grid");
  pane.setAttribute("aria-label", spec.name);
  pane.setAttribute("aria-rowcount", spec.rows.length);
  pane.setAttribute("aria-colcount", spec.columns.length);
  inner.setAttribute("role", "rowgroup");
  pane.append(inner);
  frame.append(titles, pane);
  host.append(frame, scale, detail);
  pane.addEventListener("pointermove", pointed);
  pane.addEventListener("click", pointed);
  pane.addEventListener("keydown", keys);
  pane.addEventListener("focus", () => at || (spec.rows.length && move(0, 0, false)));
  addEventListener("resize", () => requestAnimationFrame(paint));
  paint();
  return { paint };
};
