import faulthandler; faulthandler.dump_traceback_later(40, exit=True)

import asyncio, sys, threading, torch
from asyncloader import AsyncDataLoader, DataLoader

class Plain(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        return torch.full((3,), index)

class Async(Plain):
    async def __getitem__(self, index):
        await asyncio.sleep(0)
        return torch.full((3,), index)
    async def __aenter__(self):
        return self
    async def __aexit__(self, *_):
        await asyncio.sleep(0)

class Stream:
    async def __aiter__(self):
        for index in range(1000):
            await asyncio.sleep(0)
            yield index

class Sampler:
    async def __aiter__(self):
        for index in range(1000):
            await asyncio.sleep(0)
            yield index

def negated(batch):
    return -batch

alive = []

def begin(dataset, **options):
    for _ in range(2):  # one loader after the other, and two iterators of one
        loader = DataLoader(dataset, **options)
        for _ in range(2):
            alive.append(iter(loader))
            next(alive[-1])

async def begin_async(dataset, **options):
    alive.append(aiter(AsyncDataLoader(dataset, **options)))
    await anext(alive[-1])


if __name__ == "__main__":
    begin(Async(), num_workers=0)
    asyncio.run(begin_async(Async(), num_workers=0))
    print("done")
