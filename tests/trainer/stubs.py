"""Stand-ins for task, engine and verifier that do as they are told."""

from kenpo.engines.base import Engine as Base
from kenpo.episode import Episode, Segment, given
from kenpo.experience.problem import Problem
from kenpo.experience.verdict import Verdict


def episode(prompt, tokens, truncated=False, support=None, version=3):
    logp = [-0.5 * (i + 1) for i in range(len(tokens))]
    said = Segment(list(tokens), sampled=True, logp=logp, version=version, support=support)
    return Episode((given(prompt), said), finish="length" if truncated else "stop", text="text")


class Prompts:
    def encode(self, problem):
        return [7] * (2 + problem.id % 2)


class Task:
    """An endless stream, or one of `size` problems; remembers which problems were asked for."""

    name, verifier, system = "stub", "stub", None

    def __init__(self, size=None):
        self.seen, self.size, self.ids = [], size, None if size is None else range(size)

    def problem(self, id):
        self.seen.append(id)
        return Problem(id=id, prompt=f"p{id}", answer=id)

    def train(self, index):
        self.seen.append(index)
        return Problem(id=index, prompt=f"p{index}", answer=index)


class Engine(Base):
    version = 0

    def __init__(self):
        self.calls, self.seeds, self.requests = 0, [], []

    def sample(self, requests, done=None):
        self.calls += 1
        self.requests += requests
        self.seeds += [r.seed for r in requests if not r.greedy]
        episodes = [episode(r.prompt, [5, 6, 1]) for r in requests]
        for i, e in enumerate(episodes if done else []):
            done(i, e)
        return episodes

    def update(self, weights, version):
        self.version = version


class Verifier:
    """`reward(answer, number)` as the reward; the number counts all samples so far."""

    name = "stub"

    def __init__(self, reward):
        self.reward, self.seen = reward, 0

    def score(self, samples):
        first, self.seen = self.seen, self.seen + len(samples)
        return [Verdict(reward=self.reward(s.answer, i), status="ok") for i, s in enumerate(samples, first)]


def updater_of(model, algorithm, config, passes, ranks=None, reference=None):
    """An `Updater` on a new learner, as `kenpo.trainer.setup` would make it of these."""
    from kenpo.learner.learner import Learner
    from kenpo.models.scorer import Scorer
    from kenpo.trainer.setup import learner_options
    from kenpo.trainer.update import Updater

    how = {"temperature": config.temperature, "packing": config.packing}
    beside = None if reference is None else Scorer(reference, **how)
    learner = Learner(Scorer(model, reference=beside, **how), learner_options(config, passes), ranks)
    return Updater(learner, algorithm, config, passes, beside)
