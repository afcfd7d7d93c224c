"""commlib: communication compression for torch.distributed."""
from commlib.compressor import Compressor, LayerSpec, Memory, Slot
