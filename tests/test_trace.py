"""The trace's JSON form: read, written, and every malformed field named."""

import copy
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.plan.trace import Link, Node, Recompute, SavedTensor, Trace

GOOD = {
    "format": "offload-trace/1",
    "source": "by hand",
    "nodes": [{"name": f"n{k}", "seconds": 0.5, "backward": k > 1} for k in range(4)],
    "base_bytes": [1, 2, 3, 4],
    "tensors": [
        {"id": 0, "bytes": 8, "produced": 0, "packed": 0, "last_forward": 1, "first_backward": 2, "last_use": 3},
        {
            "id": 5,
            "bytes": 16,
            "produced": 0,
            "packed": 1,
            "last_forward": 1,
            "first_backward": 3,
            "last_use": 3,
            "recompute": {"seconds": 0.25, "from": [0]},
        },
    ],
}


def changed(*path_and_value):
    """Return GOOD with one value replaced, or removed where the value is `...`."""
    *path, last, value = path_and_value
    data = copy.deepcopy(GOOD)
    at = data
    for key in path:
        at = at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return data


def test_every_field_is_read():
    trace = Trace.from_dict(GOOD)
    assert trace.nodes[2] == Node("n2", 0.5, True)
    assert trace.base_bytes == (1, 2, 3, 4)
    assert trace.tensors[0] == SavedTensor(0, 8, 0, 0, 1, 2, 3)
    assert trace.tensors[1].recompute == Recompute(0.25, (0,))
    assert trace.tensors[1].recompute.bound_seconds == 0.25
    assert trace.source == "by hand"


def test_a_recipe_may_tell_its_workspace_and_its_share_of_what_is_shared():
    recipe = {"seconds": 0.25, "from": [0], "workspace": 7, "least_seconds": 0.125}
    data = changed("tensors", 1, "recompute", recipe)
    trace = Trace.from_dict(data)
    assert trace.tensors[1].recompute == Recompute(0.25, (0,), 7, 0.125)
    assert trace.tensors[1].recompute.bound_seconds == 0.125
    assert trace.to_dict() == data


def test_tensors_that_would_be_made_from_one_another_are_refused():
    data = changed("tensors", 0, "recompute", {"seconds": 0.25, "from": [5]})
    with pytest.raises(ValueError, match=r"recompute.from: the recipes of tensors \[0, 5\] form a cycle"):
        Trace.from_dict(data)


def test_what_is_written_is_what_was_read(tmp_path):
    trace = Trace.from_dict(GOOD)
    assert trace.to_dict() == GOOD
    trace.save(tmp_path / "step.json")
    assert Trace.load(tmp_path / "step.json") == trace
    assert json.loads((tmp_path / "step.json").read_text()) == GOOD


@given(st.floats(0, 1e9), st.integers(0, 2**60))
def test_numbers_survive(seconds, count):
    trace = Trace((Node("n", seconds, False),), (count,), ())
    assert Trace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace


def test_the_link_is_read_and_written_where_there_is_one(tmp_path):
    assert Trace.from_dict(GOOD).link is None
    link = {"out_bandwidth": 12e9, "in_bandwidth": 11e9, "latency": 1e-5}
    trace = Trace.from_dict({**GOOD, "link": {**link, "host": "x"}})
    assert trace.link == Link(12e9, 11e9, 1e-5)
    assert trace.to_dict() == {**GOOD, "link": link}
    trace.save(tmp_path / "step.json")
    assert Trace.load(tmp_path / "step.json") == trace
    del link["latency"]
    assert Trace.from_dict({**GOOD, "link": link}).link == Link(12e9, 11e9)


def test_an_empty_trace_is_a_trace():
    data = {"format": "offload-trace/1", "source": "", "nodes": [], "base_bytes": [], "tensors": []}
    assert Trace.from_dict(data).to_dict() == data


def test_unknown_keys_and_whole_floats_are_accepted():
    assert Trace.from_dict({**changed("tensors", 0, "bytes", 8.0), "host": "x"}) == Trace.from_dict(GOOD)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "trace: expected an object"),
        (changed("format", "offload-trace/2"), "format: expected 'offload-trace/1', got 'offload-trace/2'"),
        (changed("format", ...), "format: "),
        (changed("source", 3), "source: expected a string"),
        ({**GOOD, "link": 3}, "link: expected an object"),
        ({**GOOD, "link": {"out_bandwidth": 1.0}}, "link.in_bandwidth: missing"),
        ({**GOOD, "link": {"out_bandwidth": 0, "in_bandwidth": 1}}, "link.out_bandwidth: 0.0 is not positive"),
        ({**GOOD, "link": {"out_bandwidth": "1", "in_bandwidth": 1}}, "link.out_bandwidth: expected a number"),
        ({**GOOD, "link": {"out_bandwidth": 1, "in_bandwidth": 1, "latency": -1}}, "link.latency: -1.0 is not a"),
        (changed("nodes", ...), "nodes: missing"),
        (changed("nodes", {}), "nodes: expected a list"),
        (changed("nodes", 1, 7), r"nodes\[1\]: expected an object"),
        (changed("nodes", 1, "name", None), r"nodes\[1\].name: expected a string"),
        (changed("nodes", 1, "name", ...), r"nodes\[1\].name: missing"),
        (changed("nodes", 1, "seconds", "1"), r"nodes\[1\].seconds: expected a number"),
        (changed("nodes", 1, "seconds", True), r"nodes\[1\].seconds: expected a number"),
        (changed("nodes", 1, "seconds", -0.1), r"nodes\[1\].seconds: -0.1 is not a duration"),
        (changed("nodes", 1, "seconds", math.nan), r"nodes\[1\].seconds: nan"),
        (changed("nodes", 1, "seconds", math.inf), r"nodes\[1\].seconds: inf"),
        (changed("nodes", 1, "seconds", 10**400), r"nodes\[1\].seconds: the number is too large"),
        (changed("nodes", 1, "backward", 0), r"nodes\[1\].backward: expected true or false"),
        (changed("base_bytes", [1, 2, 3]), "base_bytes: 3 entries for 4 nodes"),
        (changed("base_bytes", 2, -1), r"base_bytes\[2\]: -1 is negative"),
        (changed("base_bytes", 2, 1.5), r"base_bytes\[2\]: expected an integer"),
        (changed("base_bytes", 2, None), r"base_bytes\[2\]: expected an integer, got null"),
        (changed("tensors", 1, "x"), r"tensors\[1\]: expected an object"),
        (changed("tensors", 1, "id", 0), r"tensors\[1\].id: 0 is already the id of tensors\[0\]"),
        (changed("tensors", 1, "id", ...), r"tensors\[1\].id: missing"),
        (changed("tensors", 1, "id", True), r"tensors\[1\].id: expected an integer"),
        (changed("tensors", 1, "bytes", -16), r"tensors\[1\].bytes: -16 is negative"),
        (changed("tensors", 1, "produced", -1), r"tensors\[1\].produced: -1 is not a node; nodes are numbered 0 to 3"),
        (changed("tensors", 1, "last_use", 4), r"tensors\[1\].last_use: 4 is not a node; nodes are numbered 0 to 3"),
        (changed("tensors", 0, "packed", 2), r"tensors\[0\].packed: 2 is after last_forward 1"),
        (changed("tensors", 1, "produced", 3), r"tensors\[1\].produced: 3 is after packed 1"),
        (changed("tensors", 0, "last_forward", 2), r"tensors\[0\].last_forward: 2 is not before first_backward 2"),
        (changed("tensors", 1, "last_use", 2), r"tensors\[1\].first_backward: 3 is after last_use 2"),
        (changed("tensors", 1, "recompute", 1), r"tensors\[1\].recompute: expected an object"),
        (changed("tensors", 1, "recompute", "seconds", ...), r"tensors\[1\].recompute.seconds: missing"),
        (changed("tensors", 1, "recompute", "seconds", -1), r"tensors\[1\].recompute.seconds: -1.0 is not"),
        (
            changed("tensors", 1, "recompute", "workspace", -1),
            r"tensors\[1\].recompute.workspace: -1 is negative; write at least 0",
        ),
        (
            changed("tensors", 1, "recompute", "workspace", "1"),
            r"tensors\[1\].recompute.workspace: expected an integer",
        ),
        (
            changed("tensors", 1, "recompute", "least_seconds", 0.3),
            r"tensors\[1\].recompute.least_seconds: 0.3 is not from 0 to seconds, 0.25; write at least 0 and no",
        ),
        (
            changed("tensors", 1, "recompute", "least_seconds", -0.1),
            r"tensors\[1\].recompute.least_seconds: -0.1 is not from 0",
        ),
        (
            changed("tensors", 1, "recompute", "least_seconds", []),
            r"tensors\[1\].recompute.least_seconds: expected a number",
        ),
        (changed("tensors", 1, "recompute", "from", ...), r"tensors\[1\].recompute.from: missing"),
        (
            changed("tensors", 1, "recompute", "from", [9]),
            r"tensors\[1\].recompute.from\[0\]: no tensor has the id 9",
        ),
        (changed("tensors", 1, "recompute", "from", [5]), r"tensors\[1\].recompute.from\[0\]: 5 is the tensor itself"),
        (changed("tensors", 1, "recompute", "from", ["0"]), r"tensors\[1\].recompute.from\[0\]: expected an integer"),
    ],
)
def test_a_malformed_field_is_named(data, message):
    with pytest.raises(ValueError, match=message):
        Trace.from_dict(data)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_json_is_named(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.json"):
        Trace.load(path)


def test_sums_that_no_machine_can_hold_are_refused():
    node, tensor = Node("fc", 1e308, False), SavedTensor(0, 2**62, 0, 0, 0, 1, 1)
    huge = {"nodes": (node, node), "base_bytes": (0, 0), "tensors": ()}
    many = {"nodes": (Node("fc", 1.0, False),) * 2, "base_bytes": (0, 2**62), "tensors": (tensor,)}
    for fields, said in ((huge, "the seconds add up to infinity"), (many, r"with base_bytes, 2\^63 bytes or more")):
        with pytest.raises(ValueError, match=said):
            Trace(**fields)


def test_a_malformed_file_is_named_with_its_field(tmp_path):
    path = tmp_path / "step.json"
    path.write_text(json.dumps(changed("tensors", 0, "packed", 2)))
    with pytest.raises(ValueError, match=r"step\.json: tensors\[0\]\.packed: 2"):
        Trace.load(path)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "none.json")
