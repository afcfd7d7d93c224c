"""Rows that outlive their backward pass, within ``no_sync``: are they still what ``grad`` is made of?

A pass that ends with no exchange leaves a layer's own gradient in ``grad``, as DDP does: a user may clip it, step with
it, or drop it. Its rows are kept beside it, and go out in its place if nobody has touched it until the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from commlib.runtime.streams import accelerator


class RetainedInput:
    """Inputs of one layer that its backward pass will need.

    Args:
        parameters: the layer's.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._made: dict[int, Tensor] = {}
        self._grads: list[tuple[Tensor | None, int]] = []
        self._mixed = self.under_way = False

    @property
    def waiting(self) -> bool:
        """Whether a pass is over whose rows are kept, and nothing has been asked or kept since."""
        return bool(self._grads)

    def made(self, products: Sequence[Tensor]) -> None:
        """A call's rows are kept, and these are their products, which autograd gets; in the order of the parameters."""
        self._mixed |= self.under_way  # of a sum of two nobody knows whether it is of these two alone
        self._made = dict(enumerate(products))  # while they are held, autograd adds nothing to them in place
        self.under_way = True

    def saw(self, index: int, grad: Tensor) -> bool:
        """All gradient of a parameter in this pass; returns whether it is none of this class's business."""
        if not self.under_way:
            return False
        made = self._made.pop(index, None)
        self._mixed |= made is None or grad.data_ptr() != made.data_ptr()
        return True

    def end(self) -> bool:
        """The pass is over; returns whether ``grad`` has got what its rows make, and nothing else."""
        alone = not self._mixed and not self._made
        self.forget()
        if alone:
            self._grads = [(p.grad, -1 if p.grad is None else p.grad._version) for p in self._parameters]
        return alone

    def untouched(self) -> bool:
        """Whether ``grad`` is what the passes before this one have left there. To be asked once."""
        same = all(
            g is p.grad and (g is None or g._version == version)
            for p, (g, version) in zip(self._parameters, self._grads, strict=True)
        )
        self.forget()
        return same

    def forget(self) -> None:
        """Drop what is retained and begin anew."""
        self._made, self._grads = {}, []
        self._mixed = self.under_way = False


def has_gradient(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether there is any, other than zeros; on a device, which nobody waits for, any at all."""
    return any(p.grad is not None and (accelerator(p.device) is not None or bool(p.grad.any())) for p in parameters)
