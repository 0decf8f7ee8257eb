"""News of a sequence that gathered is joined in one pass."""

from collections.abc import Iterator

from vllm_mlx.core.errors import GenerationError
from vllm_mlx.core.events import FinishReason
from vllm_mlx.core.step import SequenceUpdate, TokenOutput


class Counted(tuple[TokenOutput, ...]):
    num_reads = 0

    def __iter__(self) -> Iterator[TokenOutput]:
        Counted.num_reads += 1
        return super().__iter__()


def test_joined_news_has_all_tokens_the_last_progress_and_the_last_error() -> None:
    error = GenerationError("No.")
    updates = [
        SequenceUpdate(seq_id=3, tokens=Counted([TokenOutput(3, number)]), num_computed_tokens=number)
        for number in range(50)
    ]
    last = SequenceUpdate(seq_id=3, finish_reason=FinishReason.STOP, num_computed_tokens=50)
    joined = SequenceUpdate.joined([*updates, SequenceUpdate(seq_id=3, error=error), last])
    assert [token.token_id for token in joined.tokens] == [*range(50)]
    assert (joined.finish_reason, joined.num_computed_tokens, joined.error) == (FinishReason.STOP, 50, error)
    assert Counted.num_reads == 50, "each is read once"
