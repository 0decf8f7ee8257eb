"""Every byte of a folder is read, and what is damaged is named and removed."""

from tests.disk.samples import folder, numbers, run
from vllm_mlx.disk.verify import verify


def test_every_byte_is_verified(tmp_path):
    record = folder(tmp_path).add(run(), numbers())
    path = folder(tmp_path).path_of(record)
    [found] = verify(folder(tmp_path))
    assert (found.path, found.num_bytes, found.fault) == (path, record.file_bytes, None)
    content = path.read_bytes()
    for tensor in record.tensors:
        for place in range(tensor.offset, tensor.offset + tensor.nbytes, 7):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            [found] = verify(folder(tmp_path))
            assert found.path == path and found.fault and not path.exists()
