"""Models, health, facts and numbers."""

import pytest

from domino_spec.decoding import SamplingParams, Sequence, SequenceOutput
from tests.serving.fake import MODEL


def test_models(client):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model["id"] == MODEL
    assert model["created"] == client.service.created
    assert client.get(f"/v1/models/{MODEL}").json() == model


@pytest.mark.parametrize(("state", "status"), [("ready", 200), ("stopping", 503), ("failed", 503)])
def test_health(client, state, status):
    client.service.state = state
    response = client.get("/health")
    assert (response.status_code, response.json()) == (status, {"status": state})


def test_facts(client):
    assert client.get("/v1/domino").json() == client.service.info()


def numbers(client) -> dict[str, float]:
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = [line for line in response.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_what_the_engine_tells_is_counted(client):
    metrics = client.metrics
    sequence = Sequence([1], SamplingParams())
    sequence.arrived = sequence.last_output = 10.0
    metrics.set_queue(waiting=3, running=2, slots=4)
    metrics.observe_output(SequenceOutput(sequence, (1,), 0, 0, None), now=10.25)
    first = SequenceOutput(sequence, (1, 2, 3), 2, 1, None, drafts=4)
    metrics.observe_output(first, now=10.03)
    metrics.observe_output(SequenceOutput(sequence, (1,), 0, 2, None, drafts=1), now=10.03)
    metrics.observe_finished(sequence, "length")
    found = numbers(client)
    assert found["domino_answers_waiting"] == 3
    assert found["domino_answers_running"] == 2
    assert found["domino_slots"] == 4
    assert found['domino_tokens_total{kind="accepted"}'] == 2
    assert found['domino_tokens_total{kind="own"}'] == 3
    assert found["domino_cycles_total"] == 2
    assert found["domino_tokens_per_cycle_sum"] / found["domino_tokens_per_cycle_count"] == 2
    offered = [found[f'domino_drafts_offered_total{{position="{p}"}}'] for p in range(4)]
    accepted = [found[f'domino_drafts_accepted_total{{position="{p}"}}'] for p in range(4)]
    assert offered == [2, 1, 1, 1]
    assert accepted == [1, 1, 0, 0]
    assert found["domino_time_to_first_token_seconds_sum"] == 0.25
    assert found['domino_time_to_first_token_seconds_bucket{le="0.25"}'] == 1
    assert found['domino_time_to_first_token_seconds_bucket{le="0.1"}'] == 0
    assert found["domino_inter_token_seconds_count"] == 4
    assert found["domino_inter_token_seconds_sum"] == pytest.approx(0.06)
    assert found["domino_answer_seconds_count"] == 1
    assert found['domino_answers_ended_total{reason="length"}'] == 1
    assert found['domino_answers_ended_total{reason="failed"}'] == 0


def test_responses_are_counted_by_path_and_status(client):
    client.chat()
    client.chat(n=0)
    client.get("/surprise/1")
    client.get("/surprise/2")
    client.send("BREW", "/surprise/3")
    found = numbers(client)

    def count(method: str, path: str, status: int) -> float:
        labels = f'{{method="{method}",path="{path}",status="{status}"}}'
        return found["domino_http_responses_total" + labels]

    assert count("POST", "/v1/chat/completions", 200) == 1
    assert count("POST", "/v1/chat/completions", 400) == 1
    assert count("GET", "other", 404) == 2
    assert count("other", "other", 404) == 1


def test_two_servers_in_a_process_count_apart(make_client):
    one, other = make_client(), make_client()
    one.metrics.set_queue(waiting=1, running=1, slots=1)
    assert numbers(other)["domino_slots"] == 0
