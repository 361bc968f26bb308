"""`/api/node/…` by hand, in the words of docs/reference/wire/nodes.md#node-api and without LocalAI's weaknesses."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.fleet import Answer, http
from tests.support.waiting import wait_for

_numbers = itertools.count()


class HandMadeNode:
    """A worker that does nothing by itself."""

    def __init__(self, cluster: Cluster, *, pre_approved: bool = False, name: str = "", **more: Any) -> None:
        self.cluster = cluster
        self.url = cluster.members[0].url
        self.name = name or f"hand-{next(_numbers)}"
        self.join_token = cluster.token(cluster.members[0], pre_approved=pre_approved)
        self.enrolment = f"enrolment-{self.name}"
        self.more = more
        self.id = ""
        self.token = ""

    def register(self, *, token: str = "", enrolment: str | None = None, **more: Any) -> Answer:
        shown = token or self.token or self.join_token
        body = {
            "name": self.name,
            "token": shown,
            "protocol": 1,
            "enrolment": self.enrolment if enrolment is None else enrolment,
            "ingress": {"port": 50050},
            "platform": "linux/amd64",
            **self.more,
            **more,
        }
        answer = http("POST", self.url + "/api/node/register", key=shown, body=body)
        if answer.status == 201:
            told = answer.json()
            self.id = told["id"]
            self.token = told.get("node_token", self.token)
        return answer

    def call(self, what: str, body: object = None, *, token: str = "") -> Answer:
        return http("POST", f"{self.url}/api/node/{self.id}/{what}", key=token or self.token, body=body or {})

    def admin(self, method: str, what: str = "", body: object = None) -> Answer:
        return self.cluster.api(self.cluster.members[0], method, f"/api/nodes/{self.name}{what}", body)

    @property
    def view(self) -> dict[str, Any]:
        return dict(self.admin("GET").json())


def test_a_new_node_is_pending_and_gets_nothing_but_its_own_token(cluster: Cluster) -> None:
    node = HandMadeNode(cluster)
    told = node.register().json()
    assert told["status"] == "pending"
    assert told["node_type"] == "backend"
    assert told["node_token"].startswith("cn_")
    assert "nats_jwt" not in told
    assert "bus" not in told
    assert "blob_token" not in told


def test_a_pre_approved_node_is_healthy_and_gets_bus_credentials(cluster: Cluster) -> None:
    told = HandMadeNode(cluster, pre_approved=True).register().json()
    assert told["status"] == "healthy"
    assert told["nats_jwt"].startswith("eyJ")
    assert told["nats_user_seed"].startswith("SU")
    assert told["bus"]["urls"] == [cluster.bus_url]
    assert "_INBOX." not in told["bus"]["inbox"]
    assert 0 < told["expires_in_s"] <= 3600
    assert told["signing_key"]
    blob = f"{told['blob_url']}/blobs/sha256:{'0' * 64}"
    assert wait_for(lambda: http("GET", blob, key=told["blob_token"]).status == 404), "asked for, and nobody's"
    assert http("GET", blob, key=told["node_token"]).status == 401
    assert told["ingress"]["url"] == "http://127.0.0.1:50050", "the address the controller saw"


def test_a_lost_reply_does_not_strand_the_worker_nor_spend_the_token_twice(cluster: Cluster) -> None:
    node = HandMadeNode(cluster)
    first = node.register().json()
    node.token = ""  # the reply never arrived
    second = node.register().json()
    assert second["id"] == first["id"]
    assert second["node_token"] != first["node_token"]
    assert node.call("heartbeat").status == 200
    assert node.call("heartbeat", token=first["node_token"]).status == 401
    other = HandMadeNode(cluster)
    other.join_token = node.join_token
    assert other.register().status == 401, "a single use is a single use"


@pytest.mark.parametrize("extra", [{"enrolment": "another machine's"}, {"enrolment": ""}])
def test_the_same_name_without_proof_is_refused_and_told_how_to_go_on(cluster: Cluster, extra: dict[str, str]) -> None:
    node = HandMadeNode(cluster)
    node.register()
    thief = HandMadeNode(cluster, name=node.name)
    answer = thief.register(**extra)
    assert answer.status == 409
    assert f"corral nodes replace {node.name}" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "node_error"
    assert HandMadeNode.register(thief, **{"enrolment": "x"}).status == 409, "the token was not spent by the refusal"


def test_a_replacement_takes_the_name_and_ends_the_old_machine(cluster: Cluster) -> None:
    node = HandMadeNode(cluster, pre_approved=True)
    old = node.register().json()
    assert node.admin("POST", "/replace").status == 200
    assert node.call("heartbeat").status == 401
    heir = HandMadeNode(cluster, name=node.name)
    heir.enrolment = "the new machine's"
    told = heir.register().json()
    assert told["id"] == old["id"]
    assert told["status"] == "pending", "a replacement waits for approval like any other"
    assert node.register().status in (401, 409)


def test_approval_cannot_be_bypassed(cluster: Cluster) -> None:
    node = HandMadeNode(cluster)
    node.register()
    assert node.call("resume").status == 409
    assert node.admin("POST", "/resume").status == 409
    assert node.call("drain").status == 200
    assert node.call("deregister").status == 200
    assert node.register().json()["status"] == "pending"
    assert node.view["status"] == "pending"


def test_refreshing_credentials_changes_nothing_else(cluster: Cluster) -> None:
    """Nor does the controller by itself: there is no ingress for it to look for, and nobody asks who is drained."""
    node = HandMadeNode(cluster, pre_approved=True, ingress=None, address="127.0.0.1:1")
    node.register()
    assert node.admin("POST", "/drain").status == 200
    before = node.view
    told = node.call("credentials").json()
    assert told["status"] == "draining"
    assert told["nats_jwt"]
    assert "node_token" not in told
    assert node.view == before


def test_a_persons_drain_survives_a_restart_of_the_worker(cluster: Cluster) -> None:
    node = HandMadeNode(cluster, pre_approved=True)
    node.register()
    node.admin("POST", "/drain")
    assert node.call("resume").status == 409
    assert node.register().json()["status"] == "draining"
    assert node.admin("POST", "/resume").status == 200
    assert node.view["status"] == "healthy"


def test_a_clean_goodbye_stays_offline_although_a_heartbeat_is_late(cluster: Cluster) -> None:
    node = HandMadeNode(cluster, pre_approved=True)
    node.register()
    assert node.call("deregister").json() == {"message": "node set to offline"}
    beat = node.call("heartbeat", {"available_ram": 5})
    assert beat.status == 200
    assert beat.json()["message"] == "heartbeat received"
    wait_for(lambda: node.view["last_heartbeat"] > node.view["updated_at"], "written heartbeat")
    assert node.view["status"] == "offline"
    assert node.register().json()["status"] == "healthy"


def test_a_deleted_node_is_told_and_comes_back_as_new(cluster: Cluster) -> None:
    node = HandMadeNode(cluster, pre_approved=True)
    node.register()
    assert node.admin("DELETE").json() == {"message": "node deregistered"}
    for call in ("heartbeat", "credentials", "drain", "resume", "deregister"):
        assert node.call(call).status == 410, call
    assert node.register().status == 410
    fresh = HandMadeNode(cluster, name=node.name)
    fresh.enrolment = "made anew"
    told = fresh.register().json()
    assert told["id"] != node.id
    assert told["status"] == "pending"


def test_one_nodes_token_opens_nothing_of_anothers(cluster: Cluster) -> None:
    one, other = HandMadeNode(cluster, pre_approved=True), HandMadeNode(cluster, pre_approved=True)
    one.register()
    other.register()
    for call in ("heartbeat", "credentials", "drain", "resume", "deregister"):
        assert one.call(call, token=other.token).status == 401, call
    assert http("GET", f"{one.url}/api/node/{one.id}/models", key=other.token).status == 401
    assert http("GET", f"{one.url}/api/node/{one.id}/models", key=one.token).json() == []
    assert one.view["status"] == "healthy"


def test_unknown_ids_say_so_only_to_those_who_hold_a_token(cluster: Cluster) -> None:
    node = HandMadeNode(cluster, pre_approved=True)
    node.register()
    known = node.id
    node.id = "00000000-0000-4000-8000-000000000000"
    assert node.call("heartbeat").status == 404
    assert node.call("heartbeat", token="guess").status == 401
    node.id = known


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"node_type": "toaster"}, "node_type"),
        ({"name": ""}, "name is required"),
        ({"name": "x" * 256}, "255"),
        ({"name": "tab\there"}, "control"),
        ({"ingress": {"port": 0}}, "ingress.port"),
        ({"ingress": {"port": 70000}}, "ingress.port"),
        ({"ingress": None, "address": ""}, "address is required"),
        ({"labels": {"k" * 129: "v"}}, "128"),
        ({"labels": {"k": "v" * 256}}, "255"),
        ({"total_ram": -1}, "sizes"),
        ({"total_ram": 2**63}, "sizes"),
        ({"total_ram": "lots"}, "invalid request body"),
        ({"ingress": {"port": 50050, "advertise": "a:b:c:d"}}, "advertise"),
    ],
)
def test_bad_input_gets_one_clear_sentence_and_spends_nothing(
    cluster: Cluster, body: dict[str, Any], sentence: str
) -> None:
    node = HandMadeNode(cluster)
    answer = node.register(**body)
    assert answer.status == 400
    assert sentence in answer.json()["error"]["message"]
    assert node.register().status == 201


@pytest.mark.parametrize("payload", [b"{", b"[]", b'"x"', b"\xff", b'{"name": 3}', b"[" * 5000])
def test_malformed_json_is_a_400(cluster: Cluster, payload: bytes) -> None:
    import urllib.error
    import urllib.request

    request = urllib.request.Request(cluster.members[0].url + "/api/node/register", data=payload, method="POST")
    request.add_header("Authorization", "Bearer cj_x")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as error:
        assert error.code == 400
        assert json.loads(error.read())["error"]["code"] == 400


def test_without_any_token_nothing_else_is_looked_at(cluster: Cluster) -> None:
    for path in ("register", "x/heartbeat", "x/credentials"):
        answer = http("POST", f"{cluster.members[0].url}/api/node/{path}", body="not an object")
        assert answer.status == 401, path
        assert answer.json() == {"error": "registration token required"}


def test_an_oversized_body_is_refused(cluster: Cluster) -> None:
    node = HandMadeNode(cluster)
    answer = node.register(labels={"k": "v" * 2_000_000})
    assert answer.status == 413
    assert node.register().status == 201


def test_the_token_must_stand_in_header_and_body(cluster: Cluster) -> None:
    node = HandMadeNode(cluster)
    body = {"name": node.name, "address": "a:1"}
    answer = http("POST", node.url + "/api/node/register", key=node.join_token, body=body)
    assert answer.status == 401
    assert answer.json() == {"error": "registration token required"}
    answer = http("POST", node.url + "/api/node/register", body={**body, "token": node.join_token})
    assert answer.status == 401


def test_expired_revoked_and_unknown_tokens_say_which_they_are(cluster: Cluster) -> None:
    member = cluster.members[0]
    node = HandMadeNode(cluster)
    node.join_token = cluster.token(member, ttl_s=0.05, name="short")

    def state_of(name: str) -> str:
        rows = cluster.api(member, "GET", "/api/tokens").json()
        return str(next(row["state"] for row in rows if row["name"] == name))

    wait_for(lambda: state_of("short") == "expired", "expired token")
    assert "has expired" in node.register().json()["error"]
    node.join_token = cluster.token(member, name="to-revoke")
    assert cluster.api(member, "DELETE", "/api/tokens/to-revoke").status == 204
    assert "was revoked" in node.register().json()["error"]
    node.join_token = "cj_never-made"
    assert "not known" in node.register().json()["error"]


def test_numbers_of_a_heartbeat_are_stored_and_a_budget_caps_them(cluster: Cluster) -> None:
    node = HandMadeNode(cluster, pre_approved=True, total_vram=10 * 2**30, available_vram=10 * 2**30)
    node.register()
    assert node.admin("PUT", "/vram-budget", {"value": "50%"}).json() == {"vram_budget": "50%"}
    assert node.view["available_vram"] == 5 * 2**30
    node.call("heartbeat", {"available_vram": 8 * 2**30, "available_disk": 0, "total_disk": 7})
    wait_for(lambda: node.view["total_disk"] == 7, "written heartbeat")
    assert node.view["available_vram"] == 5 * 2**30
    assert node.view["available_disk"] == 0
    node.call("heartbeat", {"available_vram": 3})
    wait_for(lambda: node.view["available_vram"] == 3, "written heartbeat")


def test_a_persons_choices_survive_a_registration(cluster: Cluster) -> None:
    node = HandMadeNode(cluster, pre_approved=True, max_replicas_per_model=2, vram_budget="80%", total_vram=100)
    node.register()
    assert node.view["max_replicas_per_model"] == 2
    assert node.view["vram_budget"] == "80%"
    assert node.admin("PUT", "/max-replicas-per-model", {"value": 5}).json() == {"max_replicas_per_model": 5}
    assert node.admin("PUT", "/vram-budget", {"value": "40"}).status == 200
    node.admin("PATCH", "/labels", {"rack": "7"})
    node.register()
    view = node.view
    assert (view["max_replicas_per_model"], view["vram_budget"]) == (5, "40")
    assert view["labels"]["node.replica-slots"] == "5"
    assert view["labels"]["rack"] == "7"
    assert node.admin("DELETE", "/max-replicas-per-model").json() == {"reset": True}
    assert node.admin("DELETE", "/vram-budget").json() == {"reset": True}
    node.register()
    assert (node.view["max_replicas_per_model"], node.view["vram_budget"]) == (2, "80%")


def test_an_unreachable_ingress_is_told_in_words(cluster: Cluster) -> None:
    node = HandMadeNode(cluster, pre_approved=True, ingress={"port": 1})
    node.register()
    wait_for(lambda: node.view.get("ingress_error"), "ingress error")
    assert "http://127.0.0.1:1" in node.view["ingress_error"]
    assert "--advertise" in node.view["ingress_error"]
    member = cluster.members[0]
    attention = cluster.api(member, "GET", "/api/cluster").json()["attention"]
    assert any(node.name in line for line in attention)


def test_whom_backends_of_a_node_run_as(cluster: Cluster) -> None:
    node = HandMadeNode(cluster, pre_approved=True)
    long = "backends run as root: " + "x" * 1000
    node.register(backend_user="root", backend_user_warning=long, backend_user_fix="chmod o+x /root")
    assert (node.view["backend_user"], node.view["backend_user_fix"]) == ("root", "chmod o+x /root")
    assert node.view["backend_user_warning"] == long[:500]
    node.register(backend_user="64100")
    assert node.view["backend_user"] == "64100"
    assert {"backend_user_warning", "backend_user_fix"}.isdisjoint(node.view), "it was put right"
    node.register()
    assert "backend_user" not in node.view, "an older worker does not say"
