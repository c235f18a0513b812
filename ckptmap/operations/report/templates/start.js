// What is drawn when: the tree at once, the maps when they come near the window.
(() => {
  const near = (host, draw) => {
    if (!host) return;
    const watch = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watch.disconnect();
      draw();
    }, { rootMargin: "400px" });
    watch.observe(host);
  };

  // Titles of layers are long and alike: what they all begin with is left out.
  const common = (titles) => {
    let prefix = titles[0] || "";
    for (const title of titles) while (!title.startsWith(prefix)) prefix = prefix.slice(0, -1);
    return prefix.slice(0, prefix.lastIndexOf(".") + 1);
  };
  const shortened = (title) => title.replace(/^(?:[^.]+\.)*([^.]+\.\d+)$/, "$1").replace(/^layers\.(\d+)$/, "$1");

  function shards() {
    const map = page.data.map;
    const width = map.columns.length;
    const cells = new Map(), totals = new Array(map.rows.length).fill(0);
    const [rows = [], columns = [], nbytes = [], replicas = [], counts = []] = map.cells;
    let start = 0, most = 1;
    rows.forEach((row, i) => {
      cells.set(row * width + columns[i], { nbytes: nbytes[i], replica: replicas[i], count: counts[i], start, listed: map.listed[i] });
      start += map.listed[i];
      totals[row] += nbytes[i];
      most = Math.max(most, nbytes[i]);
    });
    const prefix = common(map.columns);
    page.grid(page.find("shard-map"), {
      rows: map.rows, columns: map.columns, cells, name: "Bytes of each layer by rank or file",
      hint: "Point at a cell, tap it, or use the arrow keys: its boxes, files and offsets appear here.",
      shorten: (title) => shortened(title.startsWith(prefix) ? title.slice(prefix.length) : title),
      level: (cell) => Math.min(8, Math.floor(Math.sqrt(cell.nbytes / most) * 9)),
      hatched: (cell) => cell.replica > 0,
      total: (row) => page.human(totals[row]),
      range: () => ["0 B", page.human(most)],
      describe: (row, column, cell) => {
        const title = `${map.rows[row]} · ${map.columns[column]}`;
        if (!cell) return { title: `${title}: nothing`, below: [] };
        const replica = cell.replica ? `, ${page.human(cell.replica)} of them replicas` : "";
        const text = page.make("p", "", `${cell.count === 1 ? "1 box" : `${page.count(cell.count)} boxes`}, ${page.human(cell.nbytes)}${replica}`);
        const shown = Math.min(cell.listed, 24);
        const below = [text, page.boxes.table(Array.from({ length: shown }, (_, i) => cell.start + i), true)];
        if (cell.count > shown) below.push(page.make("p", "hint", `and ${page.count(cell.count - shown)} more`));
        return { title: `${title}`, below };
      },
    });
  }

  function errors() {
    const host = page.find("error-maps");
    const NAMES = { 2: "relative rms", 3: "largest error", 4: "share of outliers" };
    let metric = 2;
    const number = (value) => (value === "inf" || value === "nan" ? Infinity : Number(value));
    const text = (value) => (typeof value === "string" ? value : metric === 4 ? `${(value * 100).toPrecision(3)} %` : value.toExponential(2));
    const same = page.find("same-scale");
    const bounds = (map) => {
      const maps = same && same.checked ? page.data.errors : [map];
      const all = maps.flatMap((one) => one.cells[metric] || []).map(number).filter((v) => v > 0 && Number.isFinite(v));
      return all.length ? [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))] : [0, 0];
    };
    let ranges = new Map();
    const median = (map) => {
      const all = (map.cells[metric] || []).map(number).sort((a, b) => a - b);
      return all.length ? all[Math.floor(all.length / 2)] : 0;
    };
    const grids = page.data.errors.map((map) => {
      const place = page.make("div", "heat warm");
      host.append(place);
      const cells = new Map();
      (map.cells[0] || []).forEach((row, i) => cells.set(row * map.columns.length + map.cells[1][i], i));
      const prefix = common(map.rows);
      return page.grid(place, {
        title: map.title, rows: map.rows.map((title) => (title.startsWith(prefix) ? title.slice(prefix.length) : title) || title), columns: map.columns, cells,
        name: `Errors ${map.title}`, hint: "Point at a cell, tap it, or use the arrow keys.",
        shorten: (title) => title.replace(/\.weight$/, ""),
        level: (i) => {
          const value = number(map.cells[metric][i]);
          if (!(value > 0)) return 0;
          if (!Number.isFinite(value)) return 8;
          const [low, high] = ranges.get(map);
          return high > low ? Math.min(8, Math.max(0, Math.floor((Math.log(value / low) / Math.log(high / low)) * 9))) : 4;
        },
        begin: () => ranges.set(map, bounds(map)),
        range: () => [...ranges.get(map).map(text), `median ${text(median(map))}`],
        describe: (row, column, i) => {
          const title = `${map.rows[row]} · ${map.columns[column]}`;
          if (i === undefined) return { title: `${title}: no error measured`, below: [] };
          const [, , relative, largest, outliers, count, worst, tensors] = map.cells.map((values) => values[i]);
          const line = `relative rms ${relative}, largest error ${largest}, outliers ${(outliers * 100).toPrecision(3)} %, ${page.count(count)} values differ`;
          const which = tensors > 1 ? `the worst of ${page.counted(tensors, "tensor")}: ${worst}` : worst;
          return { title: `${title} · ${NAMES[metric]} ${text(map.cells[metric][i])}`, below: [page.make("p", "", line), page.make("p", "name", which)] };
        },
      });
    });
    const choice = page.find("metrics");
    choice.hidden = false;
    choice.addEventListener("change", (event) => {
      if (event.target.name === "metric") metric = Number(event.target.value);
      grids.forEach((grid) => grid.paint());
    });
  }

  function copying() {
    const button = page.find("copy");
    button.hidden = false;
    button.addEventListener("click", () => {
      const code = page.find("command");
      const done = () => {
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      };
      const marked = () => getSelection().selectAllChildren(code);
      if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(done, marked);
      else marked();
    });
  }

  copying();
  // The verdict is there before the first of these.
  addEventListener("load", () => setTimeout(() => {
    page.tree.start();
    near(page.find("shard-map"), shards);
    near(page.find("error-maps"), errors);
  }));
})();
