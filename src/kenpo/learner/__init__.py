"""The learner: a scorer, an optimizer and the ranks; how a minibatch becomes one gradient and one step."""
