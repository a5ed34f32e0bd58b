"""What wandb has written offline."""

import struct


def read_wandb_file(path):
    """The records of a file in wandb's own format, a LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    data, position, record, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        if position + 7 + length > len(data):  # it is just being written
            break
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            records.append(wandb_internal_pb2.Record.FromString(record))
            record = b""
    return records
