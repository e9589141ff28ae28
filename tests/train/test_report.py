"""models/train/report.py: the log of a run, and its curves."""

import json
import xml.etree.ElementTree as ElementTree

import report

SVG = "{http://www.w3.org/2000/svg}"


def log(folder, records):
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_curves_show_each_loss_of_each_run(tmp_path):
    steps = range(20, 220, 20)
    log(tmp_path / "memory", [{"start": 0}] + [{"step": s, "loss": 9 / s} for s in steps]
        + [{"step": s, "valid_loss": 10 / s, "valid_ppl": 2.0} for s in steps])
    log(tmp_path / "a<b", [{"step": s, "loss": 8 / s} for s in steps])
    out = tmp_path / "curves.svg"
    report.draw({"memory": tmp_path / "memory", "a<b": tmp_path / "a<b"}, out)
    root = ElementTree.parse(out).getroot()
    lines = root.findall(SVG + "polyline")
    assert len(lines) == 3
    labels = [text.text for text in root.findall(SVG + "text")]
    assert {"memory training 0.045", "memory valid 0.050", "a<b training 0.040"} <= set(labels)
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        assert len(points) == len(steps)
        assert all(0 <= x <= report.WIDTH and 0 <= y <= report.HEIGHT for x, y in points)
        assert [y for _, y in points] == sorted(y for _, y in points), "losses fall"


def test_each_held_out_text_has_its_curve(tmp_path):
    log(tmp_path, [{"step": 1, "valid_loss": 3.0, "valid_facts_loss": 4.0}])
    assert report.curves(tmp_path) == {"valid": {1: 3.0}, "valid_facts": {1: 4.0}}


def test_what_was_logged_twice_counts_as_the_second_time(tmp_path):
    log(tmp_path, [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 1.5}])
    with open(tmp_path / "log.jsonl", "a") as f:
        f.write('{"step": 3, "lo')
    assert report.curves(tmp_path) == {"training": {1: 3.0, 2: 1.5}}


def test_a_run_without_losses_draws_nothing(tmp_path):
    log(tmp_path, [{"start": 0}])
    report.draw({"": tmp_path}, tmp_path / "curves.svg")
    assert not (tmp_path / "curves.svg").exists()


def test_equal_losses_are_drawn(tmp_path):
    log(tmp_path, [{"step": s, "loss": 1.0} for s in (1, 2)])
    report.draw({"": tmp_path}, tmp_path / "curves.svg")
    assert len(ElementTree.parse(tmp_path / "curves.svg").getroot().findall(SVG + "polyline")) == 1
