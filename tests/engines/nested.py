"""The embedded engine asked prompt by prompt: for each prompt one episode per seed."""

from kenpo.engines import hf
from kenpo.engines.base import Request


class HFEngine(hf.HFEngine):
    def generate(self, prompts, seeds, options, *, greedy=False):
        requests = [
            Request(tuple(p), seed, options, greedy) for p, row in zip(prompts, seeds, strict=True) for seed in row
        ]
        episodes = iter(self.sample(requests))
        return [[next(episodes) for _ in row] for row in seeds]
