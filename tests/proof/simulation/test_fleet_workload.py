"""The conversations that several replicas serve: their token counts are those of the demo model."""

import pytest

import localinfer
from tests.proof.simulation.fleet_workload import make_workload


@pytest.fixture(scope="module")
def llm():
    with localinfer.load(threads=1, disk_cache=False) as llm:
        yield llm


def test_prompts_have_the_counted_tokens_and_fit_the_context(llm):
    workload = make_workload(3)
    for conversation in workload.conversations:
        # Each reply as long as it may be, of words that are a token each.
        replies = [" ".join(["Once", *["story"] * (turn.reply_tokens - 1)]) for turn in conversation.turns]
        for number, turn in enumerate(conversation.turns):
            messages = conversation.messages(number, replies[:number])
            assert llm.count_chat_tokens(messages) == turn.prompt_tokens
        assert conversation.total_tokens <= llm.context_length


def test_one_replica_finds_exactly_the_shareable_tokens(llm):
    workload = make_workload(2, num_conversations=4, num_systems=2)
    found = wanted = 0
    histories = {conversation.number: [] for conversation in workload.conversations}
    for number in range(3):
        for conversation in workload.conversations:
            replies = histories[conversation.number]
            body = conversation.request_body(number, replies)
            completion = llm.chat(
                body["messages"],
                max_tokens=body["max_tokens"],
                seed=body["seed"],
                ignore_eos=True,
                logit_bias={int(token_id): bias for token_id, bias in body["logit_bias"].items()},
            )
            assert completion.stats.prompt_tokens == conversation.turns[number].prompt_tokens
            replies.append(completion.text)
            found += completion.stats.cached_tokens
            wanted += conversation.turns[number].shareable_tokens
    assert found == wanted


def test_a_seed_is_one_workload():
    assert make_workload(5) == make_workload(5) != make_workload(6)
    with pytest.raises(ValueError, match="40 conversations and 8 system prompts"):
        make_workload(1, num_conversations=41)
