"""Where no cluster is, and what Ray says of joining in words of ours; joining is in tests/golden/test_cluster.py."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.nodes import Nodes
from tuning.config.errors import ConfigError
from tuning.workers.nodes import Node
from tuning.workers.ray_join import JoinedCluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_where_nobody_listens_no_cluster_answers(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, and never listened at
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(ConfigError, match=f"cluster={address}: no Ray cluster answers there"),
            JoinedCluster(address, "nli", tmp_path, insecure=False),
        ):
            pass


def test_a_cluster_that_lets_in_everybody_is_refused(tmp_path: Path) -> None:
    with Nodes(None) as nodes:
        address = nodes.ask(add={"cpus": 1})["address"]
        with (
            pytest.raises(ConfigError, match=f"cluster={address} lets in everybody who reaches it") as failed,
            JoinedCluster(address, "nli", tmp_path, insecure=False),
        ):
            pass
    assert "insecure_cluster=true" in failed.value.remedy


@pytest.mark.parametrize(
    ("said", "insecure", "told"),
    [
        ("Token authentication is enabled but no authentication token was found.", False, "there is none here"),
        ("RPC error: InvalidAuthToken: Authentication token is missing", False, "does not take the token that is here"),
        ("RPC error: InvalidAuthToken: Authentication token is missing", True, "does not take anybody without"),
        ("ConnectionError: Could not find any running Ray instance.", False, "no Ray cluster answers there"),
        ("warning\nRuntimeError: Version mismatch: ray 2.9", False, "cannot be joined: RuntimeError: Version mismatch"),
    ],
)
def test_each_way_of_failing_has_its_error(tmp_path: Path, said: str, insecure: bool, told: str) -> None:
    assert told in str(JoinedCluster("head:6379", "nli", tmp_path, insecure=insecure)._failed(said))


@pytest.mark.parametrize(
    ("here", "kinds", "asked", "target"),
    [
        ("a", "ab", None, "a"),
        ("a", "abb", None, "a"),
        ("a", "bbc", None, "b"),
        ("a", "bc", None, "b"),
        ("a", "ab", "b", "b"),
        ("a", "b", "a", "a"),
        ("a", "ab", "z", ""),
    ],
)
def test_the_target_is_as_asked_else_of_this_machine_else_the_kind_with_most_devices(
    tmp_path: Path, here: str, kinds: str, asked: str | None, target: str
) -> None:
    cluster = JoinedCluster("head:6379", "nli", tmp_path, insecure=False)
    cluster.here = here
    cluster.nodes = [Node(str(n), "10.0.0.1", 4.0, kind=kind) for n, kind in enumerate(kinds)]
    cluster.nodes.append(Node("d", "10.0.0.1", 4.0, why="its torch is 2.0", kind="z"))
    if target:
        assert cluster.target(asked) == target
        return
    with pytest.raises(ConfigError, match=r"(?s)target=z: no node of the cluster at head:6379 is of that kind.*a, b"):
        cluster.target(asked)
