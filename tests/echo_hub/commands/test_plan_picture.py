from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from echo_hub.commands.plan import PlannedFleet, make_plan
from echo_hub.commands.plan_picture import COLOURS, WIDTH, write_svg
from echo_hub.core.capacity.model import NodeClass, Workload

WORKLOAD = Workload(mode="async", rollouts_per_step=32, train_s=2.0, broadcast_s=0.5, max_staleness=2)


def drawn(path: Path, *nodes: NodeClass) -> None:
    write_svg(make_plan(PlannedFleet(workload=WORKLOAD, nodes=nodes, kinds=nodes), target=1.0), path)


def test_a_picture_that_browsers_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    drawn(path, NodeClass(name="<&>", count=3, rollouts_per_s=4.0, latency_s=0.5))
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    boxes = [element for element in root.iter() if element.tag.endswith("rect")]
    assert set(COLOURS.values()) <= {box.get("fill") for box in boxes}
    assert all(0 <= float(box.get("x", 0)) + float(box.get("width", 0)) <= WIDTH for box in boxes)
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"learner", "broadcast", "sampling", "21", "26", "waits for rollouts"} <= set(words)
    assert words[0] == "The learner trains 75% of the time, a step every 2.67 s"


def test_without_nodes_there_is_nothing_to_draw(tmp_path: Path) -> None:
    drawn(tmp_path / "plan.svg")
    assert not (tmp_path / "plan.svg").exists()
