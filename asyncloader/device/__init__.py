"""Batches on an accelerator, ahead of the consumer.

Data path: reorder -> delivery -> [device] -> consumer. In the order of a batch:

    options        what the user asked for, checked
    accelerator    what is asked of a device; which one serves a torch.device
    cuda, driver   CUDA: a side stream, events, page-locking
    numa           where there are several nodes: near the device
    locking        rings are page-locked when their first batch comes
    stage          a batch is opened, and copied from its slot
    release        its slot is kept until the copy is done
    mover          what happens to it on the device, and how the consumer gets it
    ranges         tensors that lie side by side are copied together
    tensors        the tensors of a batch, wherever in it they are
    static         tensors that stay where they are, for CUDA graphs
"""
