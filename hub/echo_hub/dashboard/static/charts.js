// Draws every [data-chart] with uPlot, as defined by echo_hub.dashboard.charts. Values are columns of /api/v1/curves,
// updated through live.js, or of live parts with JSON. All charts of a page share cursor and zoom.
"use strict";
(() => {
  const CURVES = "curves";
  const MIN_SPAN = 2; // Smallest zoom, in steps.
  const STEPS_AHEAD = 1.02;
  const charts = [...document.querySelectorAll("[data-chart]")].map((element) => ({
    element,
    view: JSON.parse(element.dataset.chart),
    plot: null,
  }));
  const hasCurves = charts.some(({ view }) => view.lines.some((line) => line.table === CURVES));
  let width = 0; // Steps in each point of the curves.
  let points = [];
  let zoom = null; // [from, to] in steps; null shows all.
  let busy = false;
  let again = false;

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const lastStep = () => (points.length ? points[points.length - 1].step : 0);
  const rounded = (value) => Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });
  const percent = (value) => `${rounded(100 * value)} %`;
  const format = (view) => (value) => (value === null || value === undefined ? "–" : (view.share ? percent : rounded)(value));

  // Numbers

  function columnsOf(table, names) {
    if (table === CURVES) return [points.map((point) => point.step), ...names.map((name) => points.map((point) => point[name]))];
    const { x, ...columns } = JSON.parse(document.getElementById(table).textContent);
    return [x, ...names.map((name) => columns[name])];
  }

  const combined = (left, right, sign) => left.map((value, i) => (value === null || right[i] === null ? null : value + sign * right[i]));

  // The chart's data, [x, y, ...], in the order of `seriesOf`; several tables are joined on x.
  function dataOf(view) {
    const tables = view.lines.map((line) => {
      if (!line.error) return columnsOf(line.table, [line.column]);
      const [x, value, error] = columnsOf(line.table, [line.column, line.error]);
      return [x, combined(value, error, 1), combined(value, error, -1), value];
    });
    return uPlot.join(tables);
  }

  // Options

  function seriesOf(view) {
    const show = format(view);
    return view.lines.flatMap((line) => {
      const stroke = color(line.colour);
      const main = {
        label: line.label,
        stroke,
        width: line.width,
        spanGaps: true,
        value: (_, value) => show(value),
        points: { show: line.style === "points" ? true : undefined, size: 7, fill: stroke },
      };
      if (line.style === "steps") main.paths = uPlot.paths.stepped({ align: 1 });
      if (line.style === "dotted" || line.style === "points") main.dash = [2, 3];
      if (!line.error) return [main];
      const edge = { label: "", stroke: "transparent", spanGaps: true, points: { show: false }, class: "edge" };
      return [edge, edge, main];
    });
  }

  function bandsOf(view) {
    let place = 1;
    return view.lines.flatMap((line) => {
      const here = place;
      place += line.error ? 3 : 1;
      return line.error ? [{ series: [here, here + 1], fill: `${color(line.colour)}2e` }] : [];
    });
  }

  function xRange(view, data) {
    if (zoom !== null) return zoom;
    const xs = data[0];
    const last = xs.length ? xs[xs.length - 1] : 0;
    if (view.own_range && xs.length > 1) return [xs[0], last];
    return [0, Math.max(last, 10) * STEPS_AHEAD];
  }

  // The range of the visible values, with a margin.
  function yRange(view) {
    return (plot, low, high) => {
      if (low === null) return view.logarithmic ? [0.1, 10] : [0, Math.max(view.at_least, 1)];
      if (view.logarithmic) return uPlot.rangeLog(Math.min(low, 1), Math.max(high, 1), 10, false);
      return [Math.min(low, 0) * 1.08, Math.max(high, view.at_least) * 1.08 || 1];
    };
  }

  function axis(label, size, format) {
    const muted = color("muted");
    return {
      label,
      labelSize: 18,
      labelGap: 0,
      labelFont: `11px ${getComputedStyle(document.body).fontFamily}`,
      font: `11px ${getComputedStyle(document.body).fontFamily}`,
      size,
      gap: 4,
      stroke: muted,
      grid: { stroke: color("grid"), width: 1 },
      ticks: { show: false },
      ...(format ? { values: (_, values) => values.map((value) => (value === null ? "" : format(value))) } : {}),
    };
  }

  function optionsOf({ element, view }) {
    const whole = (value) => (Number.isInteger(value) ? value.toLocaleString("en") : "");
    return {
      ...sizeOf(element),
      scales: {
        x: { time: false, range: (plot) => xRange(view, plot.data) },
        y: { distr: view.logarithmic ? 3 : 1, range: yRange(view) },
      },
      series: [{ label: view.x, value: (_, value) => (value === null ? "–" : value.toLocaleString("en")) }, ...seriesOf(view)],
      bands: bandsOf(view),
      axes: [
        { ...axis(view.x, 28, whole), grid: { show: false } },
        axis(view.y, 44, view.share ? percent : rounded),
      ],
      cursor: {
        sync: { key: "steps", scales: ["x", null], setSeries: false },
        drag: { x: true, y: false, setScale: false },
        focus: { prox: -1 },
        bind: { dblclick: () => () => show(null) },
        points: { size: 6 },
      },
      hooks: { setSelect: [(plot) => select(plot)] },
      legend: { live: true },
    };
  }

  // Zoom and cursor

  function show(range) {
    zoom = range;
    for (const { plot } of drawn()) plot.setData(plot.data);
    const one = document.getElementById("zoom");
    if (one !== null) one.hidden = zoom === null;
  }

  function select(plot) {
    const { left, width: span } = plot.select;
    if (span <= 0) return;
    const [from, to] = [plot.posToVal(left, "x"), plot.posToVal(left + span, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    show(to - from < MIN_SPAN ? [(from + to - MIN_SPAN) / 2, (from + to + MIN_SPAN) / 2] : [from, to]);
  }

  function nearer(plot, factor) {
    const { min, max } = plot.scales.x;
    const middle = plot.cursor.idx === null || plot.cursor.idx === undefined ? (min + max) / 2 : plot.data[0][plot.cursor.idx];
    const half = (Math.max((max - min) * factor, MIN_SPAN)) / 2;
    const all = [0, Math.max(...drawn().map((chart) => chart.plot.data[0].at(-1) ?? 0), 10) * STEPS_AHEAD];
    const range = [Math.max(middle - half, all[0]), Math.min(middle + half, all[1])];
    show(range[0] <= all[0] && range[1] >= all[1] ? null : range);
  }

  function moveTo(plot, step) {
    const xs = plot.data[0];
    if (!xs.length) return;
    const at = plot.cursor.idx;
    const place = at === null || at === undefined ? xs.length - 1 : Math.min(Math.max(at + step, 0), xs.length - 1);
    // 1: the other charts follow, as with a mouse.
    plot.setCursor({ left: plot.valToPos(xs[place], "x"), top: plot.over.clientHeight / 2 }, true, true);
  }

  function onKey(event, plot) {
    const keys = {
      ArrowLeft: () => moveTo(plot, -1),
      ArrowRight: () => moveTo(plot, 1),
      "+": () => nearer(plot, 0.5),
      "-": () => nearer(plot, 2),
      Escape: () => show(null),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  }

  // Drawing

  // The plot's height excludes the legend.
  function sizeOf(element) {
    const legend = element.querySelector(".u-legend");
    return { width: element.clientWidth, height: Math.max(element.clientHeight - (legend?.offsetHeight ?? 28), 60) };
  }

  function make(chart) {
    chart.plot?.destroy();
    chart.plot = new uPlot(optionsOf(chart), dataOf(chart.view), chart.element);
    chart.element.plot = chart.plot;
    // uPlot lays itself out in a microtask; before it, the legend has one line for each curve.
    queueMicrotask(() => chart.plot.setSize(sizeOf(chart.element)));
  }

  const drawn = () => charts.filter(({ plot }) => plot !== null);

  // A chart in a folded part is created when the part is opened.
  function makeSeen() {
    for (const chart of charts) if (chart.plot === null && chart.element.checkVisibility()) make(chart);
  }

  function draw() {
    for (const { view, plot } of drawn()) plot.setData(dataOf(view));
  }

  // Curves

  const bucket = (step) => Math.floor((step - 1) / width);

  function take(news) {
    if (news.width !== width) points = [];
    width = news.width;
    if (!news.points.length) return;
    const first = bucket(news.points[0].step);
    while (points.length && bucket(points[points.length - 1].step) >= first) points.pop(); // The last point may have changed.
    points.push(...news.points);
  }

  async function load() {
    again = busy;
    if (busy) return;
    busy = true;
    try {
      const answer = await fetch(`/api/v1/curves?width=${width}&since=${lastStep()}`);
      if (answer.ok) take(await answer.json());
      draw();
    } catch {
      // The hub is away; the stream sends what is missing when it reconnects.
    } finally {
      busy = false;
    }
    if (again) load();
  }

  document.addEventListener("echo:curves", ({ detail: news }) => {
    if (news.width !== width || news.since > lastStep()) {
      load();
      return;
    }
    take(news);
    draw();
  });
  const tables = new Set(charts.flatMap(({ view }) => view.lines.map((line) => line.table)));
  document.addEventListener("echo:part", ({ target }) => tables.has(target.id) && draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn().forEach(make));
  document.getElementById("zoom")?.addEventListener("click", () => show(null));
  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) target.plot?.setSize(sizeOf(target));
  });
  for (const chart of charts) {
    chart.element.addEventListener("keydown", (event) => chart.plot && onKey(event, chart.plot));
    sizes.observe(chart.element);
  }
  makeSeen();
  document.addEventListener("toggle", makeSeen, true);
  if (hasCurves) load();
})();
