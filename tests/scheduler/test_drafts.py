"""Drafts beside those of a search through the row's whole text, and the forward passes that they save."""

import gc
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.project.sources import ROOT
from vllm_mlx import demo
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.core.step import BY_HEAD, StepOutput, Verified
from vllm_mlx.scheduler.depth import DepthController
from vllm_mlx.scheduler.drafts import Draft, PromptIndex, RowDrafts
from vllm_mlx.scheduler.speculation import Speculation

MOST = 7


def longest_repetition(text: list[int], first: int) -> int | None:
    """The position behind the latest earlier occurrence, not before `first`, of the longest n-gram that ends `text`."""
    for size in (6, 3):
        found = [end for end in range(max(size, first), len(text)) if text[end - size : end] == text[-size:]]
        if len(text) >= size and found:
            return found[-1]
    return None


def continued(text: list[int], at: int, most: int) -> tuple[int, ...]:
    """What stands at a position of a text that goes on with what stands there."""
    grown = list(text)
    for place in range(at, at + most):
        grown.append(grown[place])
    return tuple(grown[len(text) :])


def text_of(rng: random.Random, alphabet: int, most: int) -> list[int]:
    """Random tokens, parts of which repeat."""
    text: list[int] = []
    for _ in range(rng.randrange(6)):
        text += [rng.randrange(alphabet) for _ in range(rng.randrange(most))]
        text += text[rng.randrange(len(text) + 1) :][: rng.randrange(most)]
    return text


@pytest.mark.parametrize("is_indexed", [True, False], ids=["indexed", "reply alone"])
@pytest.mark.parametrize("alphabet", [1, 2, 3, 6, 30])
def test_ngrams_give_what_a_search_gives(alphabet: int, is_indexed: bool) -> None:
    rng, num_drafts = random.Random(alphabet), 0
    for _ in range(60):
        prompt, reply = text_of(rng, alphabet, 12), text_of(rng, alphabet, 12)
        if not is_indexed:
            prompt = [*(1000 + n for n in range(2000)), *prompt]  # too long to be indexed by the engine thread
        drafter = RowDrafts(tuple(prompt), rng.choice([None, PromptIndex(prompt)]) if is_indexed else None)
        first, text = 0 if is_indexed else len(prompt), list(prompt)
        while reply:
            most = rng.randrange(1, 9)
            at = longest_repetition(text, first)
            expected = None if at is None else Draft(continued(text, at, most), "ngram")
            assert drafter.draft(most) == expected
            num_drafts += expected is not None
            taken = [reply.pop(0) for _ in range(min(len(reply), rng.choice([1, 1, 2, 5])))]
            drafter.take(taken)
            text += taken
    assert num_drafts > 30


def test_an_ngram_may_span_prompt_and_reply() -> None:
    drafter = RowDrafts((1, 2, 3, 50), None)
    drafter.take([60, 70, 1, 2, 3])
    assert drafter.draft(3) == Draft((50, 60, 70), "ngram")
    drafter.take([9, 3, 50, 60])
    assert drafter.draft(2) == Draft((70, 1), "ngram")


def test_a_loop_goes_round() -> None:
    drafter = RowDrafts((5,), None)
    drafter.take([1, 2, 1, 2, 1])
    assert drafter.draft(7) == Draft((2, 1, 2, 1, 2, 1, 2), "ngram")


def test_no_place_for_drafts_gives_none() -> None:
    drafter = RowDrafts((1, 1, 1, 1, 1), None, (4,))
    assert drafter.draft(0) is None
    assert drafter.draft(-1) is None


# Forced tokens


def test_forced_tokens_come_first_and_are_taken_one_by_one() -> None:
    drafter = RowDrafts((1, 2, 3, 4, 1, 2, 3), None, (20, 21))
    drafter.force([7, 8, 9])
    assert drafter.draft(2) == Draft((7, 8), "grammar")
    drafter.take([7])
    assert drafter.draft(7) == Draft((8, 9), "grammar")
    drafter.take([8, 9])
    assert drafter.draft(7) is None


def test_another_token_ends_what_was_forced() -> None:
    drafter = RowDrafts((1,), None, (20, 21, 22))
    drafter.force([7, 8, 9])
    drafter.take([20])
    assert drafter.draft(7) == Draft((21, 22), "prediction")
    drafter.force([5])
    drafter.force([6])
    assert drafter.draft(7) == Draft((6,), "grammar")
    drafter.force(())
    assert drafter.draft(7) == Draft((21, 22), "prediction")


# The prediction


@pytest.mark.parametrize("as_index", [True, False])
def test_a_prediction_is_followed_and_found_again(as_index: bool) -> None:
    prediction = (*range(100, 140), *range(100, 110), 7, 8)
    drafter = RowDrafts((1, 2, 3), None, PromptIndex(prediction) if as_index else prediction)
    assert drafter.draft(3) == Draft((100, 101, 102), "prediction")
    drafter.take(range(100, 120))
    assert drafter.draft(3) == Draft((120, 121, 122), "prediction")
    drafter.take([5])
    assert drafter.draft(3) is None, "the reply has left it"
    drafter.take([6, 123, 124, 125])
    assert drafter.draft(3) == Draft((126, 127, 128), "prediction"), "behind what the reply replaced"
    drafter.take([5, 100, 101, 102])
    assert drafter.draft(3) == Draft((103, 104, 105), "prediction")
    drafter.take([103, 104, 105, 106, 107, 108, 109])
    assert drafter.draft(5) == Draft((7, 8), "prediction"), "the next of two occurrences, and then the end"
    drafter.take([7, 8])
    assert drafter.draft(3) is None


def test_a_prediction_that_is_wrong_leaves_room_for_ngrams() -> None:
    drafter = RowDrafts((1, 2, 3, 4, 5), None, (30, 31, 32))
    drafter.take([1, 2, 3])
    assert drafter.draft(2) == Draft((4, 5), "ngram")


# Cost


def calls(work: Callable[[], object]) -> int:
    """Calls of functions, those in C included."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection calls what others have asked it to call
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_a_token_costs_the_same_at_any_length() -> None:
    def work_of_a_token(num_prompt: int, num_reply: int) -> int:
        prompt = tuple(range(10, 10 + num_prompt))
        index = PromptIndex(prompt)
        drafter = RowDrafts(prompt, index, index)
        drafter.take(token % 90 for token in range(num_reply))
        drafter.take([*prompt[5:11], 3, *prompt[7:14]])

        def work() -> None:
            assert drafter.draft(MOST) is not None
            drafter.take([2])
            assert drafter.draft(MOST) is None

        return calls(work)

    assert work_of_a_token(100_000, 30_000) == work_of_a_token(100, 100) < 150


# Edits of whole files


def edits(number: int) -> list[tuple[str, str]]:
    """Old and new text of files that the latest commits changed."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    try:
        log = git("log", "--diff-filter=M", "--name-only", "--format=commit %H", "-n", "400", "--", "vllm_mlx/*.py")
    except (OSError, subprocess.CalledProcessError):
        return []
    found: list[tuple[str, str]] = []
    for entry in log.split("commit ")[1:]:
        commit, *files = entry.split()
        old, new = (git("show", f"{at}:{files[0]}") for at in (commit + "^", commit))
        if len(new) > 4000 and len(found) < number:
            found.append((old, new))
    return found


@pytest.mark.full
def test_whole_files_are_rewritten_with_three_tokens_a_pass() -> None:
    from vllm_mlx.formats.tokenizer import Tokenizer

    pairs = edits(20)
    if len(pairs) < 20:
        pytest.skip("the checkout has no history")
    tokenizer = Tokenizer.load(Path(demo.__path__[0]))
    rates, drafted, accepted = [], 0, 0
    for old, new in pairs:
        prompt, reply = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (old, new))
        drafter, at, passes = RowDrafts(prompt, PromptIndex(prompt)), 0, 0
        while at < len(reply):
            draft = drafter.draft(MOST)
            tokens = draft.tokens if draft else ()
            pairs_of_tokens = enumerate(zip(tokens, reply[at:], strict=False))
            right = next(
                (i for i, (guess, token) in pairs_of_tokens if guess != token), min(len(tokens), len(reply) - at)
            )
            drafter.take(reply[at : at + right + 1])
            at, passes = at + right + 1, passes + 1
            drafted, accepted = drafted + len(tokens), accepted + right
        rates.append(len(reply) / passes)
    print(
        f"{statistics.median(rates):.1f} tokens a pass, {min(rates):.1f} to {max(rates):.1f}, {accepted / drafted:.0%}"
    )
    assert statistics.median(rates) >= 3


def test_a_head_drafts_where_nothing_better_is_known() -> None:
    drafter = RowDrafts([7, 8, 9, 1, 2, 3, 4, 5, 6, 11, 12, 1, 2, 3], None, prediction=[40, 41], has_head=True)
    assert drafter.draft(3) == Draft((40, 41), "prediction")
    drafter.take([4, 5])
    assert drafter.draft(3) == Draft((BY_HEAD,) * 3, "mtp"), "five tokens that repeat are few"
    drafter.take([6])
    assert drafter.draft(2) == Draft((11, 12), "ngram")
    drafter.force([50])
    assert drafter.draft(2) == Draft((50,), "grammar")
    assert drafter.draft(0) is None


def test_a_head_that_is_always_wrong_parks_and_ngrams_go_on() -> None:
    speculation = Speculation(DepthController(MOST), 1000, shares_forward=True, state_bytes=0, has_head=True)
    seq = Sequence(seq_id=0, prompt=PromptInputs(token_ids=(5,)), sampling=TokenSampling(), max_tokens=400)
    speculation.open(seq)
    text = [*range(10, 250), *range(30, 120)]
    now, drafted_at = 0.0, []
    while seq.num_output_tokens < len(text):
        drafts, _ = speculation.plan([seq], now, 1 << 30, is_ahead=False, merged=(), is_alone=True)
        block = drafts.get(0, ())
        coming = text[seq.num_output_tokens : seq.num_output_tokens + 1 + len(block)]
        right = next((at for at, draft in enumerate(block) if coming[at : at + 1] != [draft]), len(block))
        now += 0.01 * (1 + 0.05 * len(block))
        verified = (Verified(0, len(block), min(right, len(coming) - 1)),) if block else ()
        speculation.learn(StepOutput(verified=verified))
        if block and right:
            drafted_at.append(seq.num_output_tokens)
        for token in coming[: 1 + right]:
            seq.output_token_ids.append(token)
            speculation.take(seq, token)
    assert speculation.num_accepted["mtp"] == 0 and speculation.num_drafted["mtp"] < 80
    assert drafted_at and drafted_at[0] < 250, "six tokens after the text repeats"
