// Draws the operator's charts from /api/v1/steps and /api/v1/run; live.js says when there is more.
"use strict";
(() => {
  const STEPS_PER_ANSWER = 1000;
  const steps = [];
  let run = null;
  let busy = false;
  let again = false;

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const config = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: "reset" };

  const lastStep = () => (steps.length ? steps[steps.length - 1].step : 0);
  const end = () => Math.max(lastStep(), 10) * 1.02;

  function layout(values, over) {
    const axis = {
      gridcolor: color("grid"),
      linecolor: color("line"),
      zeroline: false,
      fixedrange: true,
      automargin: true,
      tickfont: { size: 11 },
      ticks: "",
      layer: "below traces",
    };
    const known = values.filter((value) => Number.isFinite(value));
    const highest = Math.max(...known, over.atLeast);
    const lowest = Math.min(...known, 0);
    return {
      margin: { l: 38, r: 8, t: 6, b: 26 },
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      font: { family: getComputedStyle(document.body).fontFamily, color: color("muted"), size: 11 },
      showlegend: false,
      hovermode: "x unified",
      hoverlabel: { bgcolor: color("panel"), bordercolor: color("line"), font: { color: color("ink") } },
      xaxis: { ...axis, range: [0, end()], showgrid: false, tickformat: ",d" },
      yaxis: { ...axis, range: [lowest * 1.08, highest * 1.08], dtick: over.dtick },
    };
  }

  function line(values, name, stroke, width, extra) {
    const alone = steps.length === 1;
    return {
      x: steps.map((s) => s.step),
      y: values,
      name,
      mode: alone ? "markers" : "lines",
      line: { color: stroke, width, ...extra },
      marker: { color: stroke, size: 6 },
      hovertemplate: "%{y:.3~g}",
    };
  }

  function speeds() {
    return steps.map((s, i) => {
      if (i === 0) return null;
      const seconds = s.trained_at - steps[i - 1].trained_at;
      return seconds > 0 ? s.num_rollouts / seconds : null;
    });
  }

  function draw() {
    const evaluations = run === null ? [] : run.evaluations;
    const accuracy = {
      x: evaluations.map((e) => e.policy_version),
      y: evaluations.map((e) => e.accuracy),
      name: "held-out accuracy",
      mode: "lines+markers",
      line: { color: color("accuracy"), width: 1, dash: "dot" },
      cliponaxis: false,
      marker: { color: color("accuracy"), size: 10, symbol: "diamond", line: { color: color("ground"), width: 1.5 } },
      hovertemplate: "%{y:.1%}",
    };
    const rewards = steps.map((s) => s.mean_reward);
    const reward = line(rewards, "mean reward", color("reward"), 2);
    const heights = [...rewards, ...accuracy.y];
    Plotly.react("chart-reward", [reward, accuracy], layout(heights, { atLeast: 0.95 }), config);

    const bound = run === null ? 0 : run.max_staleness;
    const largest = steps.map((s) => s.staleness_max);
    Plotly.react(
      "chart-staleness",
      [
        { ...line([bound, bound], "bound", color("muted"), 1.5, { dash: "dot" }), x: [0, end()], mode: "lines", hoverinfo: "skip" },
        line(largest, "max", color("staleness-faint"), 1.5, { shape: "hv" }),
        line(steps.map((s) => s.staleness_mean), "mean", color("staleness"), 2),
      ],
      layout([...largest, bound], { atLeast: 1, dtick: bound <= 6 ? 1 : undefined }),
      config,
    );
    const speed = speeds();
    Plotly.react("chart-speed", [line(speed, "rollouts/s", color("speed"), 2)], layout(speed, { atLeast: 1 }), config);
  }

  async function load() {
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    try {
      do {
        again = false;
        const answers = await Promise.all([fetch(`/api/v1/steps?since=${lastStep()}`), fetch("/api/v1/run")]);
        if (!answers.every((answer) => answer.ok)) return;
        const [more, now] = await Promise.all(answers.map((answer) => answer.json()));
        if (run !== null && now.run_id !== run.run_id) {
          location.reload(); // Another run is behind this address now.
          return;
        }
        run = now;
        steps.push(...more.steps);
        again = again || more.steps.length === STEPS_PER_ANSWER;
        draw();
      } while (again);
    } catch {
      // The hub went away in between; the next `changed` loads what is missing.
    } finally {
      busy = false;
    }
  }

  document.addEventListener("echo:changed", load);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  load();
})();
