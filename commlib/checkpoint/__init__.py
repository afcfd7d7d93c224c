"""State of an attached model in checkpoints: state dicts, torch.distributed.checkpoint, files."""

from commlib.checkpoint.state_dict import StateDict, from_state, merge_state_dicts, needed_slots, to_state

__all__ = ["StateDict", "from_state", "merge_state_dicts", "needed_slots", "to_state"]
