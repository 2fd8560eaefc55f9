"""Stand-ins for task, engine and verifier that do as they are told."""

from kenpo.engines.base import Completion
from kenpo.experience.problem import Problem
from kenpo.experience.verifiers import Verdict


def completion(tokens, truncated=False, support=None, version=3):
    return Completion(list(tokens), [-0.5 * (i + 1) for i in range(len(tokens))], truncated, support, "text", version)


class Prompts:
    def encode(self, problem):
        return [7] * (2 + problem.id % 2)


class Task:
    """An endless stream; remembers which problems were asked for."""

    name, verifier, system = "stub", "stub", None

    def __init__(self):
        self.seen = []

    def train(self, index):
        self.seen.append(index)
        return Problem(id=index, prompt=f"p{index}", answer=index)


class Engine:
    version = 0

    def __init__(self):
        self.calls, self.seeds = 0, []

    def generate(self, prompts, seeds, options, *, greedy=False):
        self.calls += 1
        self.seeds += [s for row in seeds for s in row]
        return [[completion([5, 6, 1]) for _ in row] for row in seeds]


class Verifier:
    """`rewards(problem id, number in the batch)` as the reward."""

    name = "stub"

    def __init__(self, reward):
        self.reward = reward

    def score(self, samples):
        return [Verdict(reward=self.reward(s.answer, i), status="ok") for i, s in enumerate(samples)]


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
