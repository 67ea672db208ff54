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
    ],
)
def test_nodes_unlike_the_target_are_left_out(
    tmp_path: Path, here: str, kinds: str, asked: str | None, target: str
) -> None:
    cluster = cluster_of(kinds, here, tmp_path)
    assert cluster.choose_target(asked) == target
    assert [node.kind for node in cluster.training] == [kind for kind in kinds if kind == target]
    assert {node.why for node in cluster.nodes if node.kind not in (target, "z")} == {
        f"it is of another kind, {kind}, than the target, {target}" for kind in set(kinds) - {target}
    }
    assert cluster.nodes[-1].why == "its torch is 2.0", "what was said of it stays"


@pytest.mark.parametrize(("kinds", "asked"), [("ab", "z"), ("b", "a")])
def test_a_target_that_no_node_can_train_for_is_refused(tmp_path: Path, kinds: str, asked: str) -> None:
    cluster = cluster_of(kinds, "a", tmp_path)
    with pytest.raises(ConfigError, match=f"target={asked}: no node of the cluster at head:6379 that can train is of"):
        cluster.choose_target(asked)
    assert len(cluster.training) == len(kinds)


def cluster_of(kinds: str, here: str, folder: Path) -> JoinedCluster:
    """Returns a cluster with a node of each kind, and one with another torch; this machine is of kind `here`."""
    cluster = JoinedCluster("head:6379", "nli", folder, insecure=False)
    cluster.here = here
    cluster.nodes = [Node(str(n), "10.0.0.1", 4.0, kind=kind) for n, kind in enumerate(kinds)]
    cluster.nodes.append(Node("d", "10.0.0.1", 4.0, why="its torch is 2.0", kind="z"))
    return cluster
