"""What the next plan hands to the runner agrees with itself."""

from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.core.step import Restore
from vllm_mlx.scheduler.running_set import Pending


def test_a_row_that_leaves_in_the_step_of_its_restore_is_not_restored() -> None:
    """Else its state would stay, and its prompt would be computed behind it."""
    prompt = PromptInputs(token_ids=(1, 2))
    rows = [Sequence(seq_id=row, prompt=prompt, sampling=TokenSampling(), max_tokens=1) for row in (1, 2)]
    pending = Pending(restores=[Restore(row, None) for row in rows])
    pending.drop(1)
    assert pending.release == [1] and [restore.seq.seq_id for restore in pending.restores] == [2]
