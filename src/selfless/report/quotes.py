"""The paper's own words for each claim, by the text of the claim; claims without words are read from its numbers, or asked by us."""

from __future__ import annotations

EWC = "a boost in the average performance … equal to 3.1 % … and a boost of 2.8 % with hidden layer size 64"
TASKS = "succeeds to improve the performance on all the learned tasks"
SMALLER = "better accuracy using a network with a 64-dimensional hidden size than … No-Reg on a network of double that size"

BOTH_IMPROVE = "L1-Rep and DeCov continue to improve over the non regularized case"

WORDS = {
    "SLNID adds two points or more to EWC, 128 units": EWC,
    "SLNID adds two points or more to EWC, 64 units": EWC,
    "SLNID improves on all the learned tasks, 128 units": TASKS,
    "SLNID improves on all the learned tasks, 64 units": TASKS,
    "SLNID with 64 units does better than EWC alone with 128": SMALLER,
    "SLNID with 64 units does better than No-Reg with 128": SMALLER,
    "Sparsity of activations beats sparsity of parameters: L1-Rep > L1-Param": "L1-Rep yields superior performance over L1-Param",
    "Regularizers of the representation beat OrthReg, the best of those of the parameters": (
        "OrthReg … is lower than what can be achieved by the representational regularizers"
    ),
    "Regularizers of the representation are superior to all the others in all the tasks": (
        "in all the different tasks, the representational regularizers show a superior performance"
    ),
    "SLNID is among the best: within half a point of DeCov and L1-Rep, in every task": (
        "high if not the highest performance in all the tasks"
    ),
    "Maxout and LWTA improve slightly over ReLU": "achieve a slightly higher performance than ReLU",
    "Maxout and LWTA perform alike: within a point": "We did not observe a significant difference",
    "SLNID is best on the last two tasks": "performs the best on the last two tasks",
    "SLNID improves over No-Reg by 5 points or more": "improve over 6 % compared to No-Reg",
    "SLNID improves over No-Reg by 4 points or more": "4-8 % compared to No-Reg",
    "SLNID is two points or more above DeCov": "an improvement of 2 % over Decov",
    "SLNID performs best: ahead of L1-Rep and of DeCov": "performs overall best",
    "DeCov improves over No-Reg": BOTH_IMPROVE,
    "L1-Rep, too, improves over No-Reg": BOTH_IMPROVE,
    "L1-Rep suffers: at most a point above No-Reg": "L1-Rep seems to suffer in this case",
    "L2-WD and L1-Param do not improve over the activation functions: at most level with the best, Maxout": (
        "do not systematically show an improvement over the use of the different activation functions only"
    ),
    "A plain L1 norm does not help here: L1-Rep at most a point above No-Reg": (
        "Simple L1-norm regularizer (L1-Rep) doesn't help in such more complex tasks"
    ),
    "SLNID's activations peak at zero, the others' are spread: more neurons below 0.05 than with any other, by five points or more": (
        "a peak at zero … while the other methods values are spread along the line"
    ),
    "The more inhibition, the more parameters stay free: after task 1, every λ leaves at least as many as the one before": (
        "the more neural inhibition, the smaller the percentage of important parameters"
    ),
    "At the end of the sequence, too, more inhibition leaves more parameters free": (
        "the more neural inhibition, the smaller the percentage of important parameters"
    ),
    "With our grid: every λ but its highest, 0.03, improves over No-Reg": (
        "Apart from the highest λ … improvement over the No-Reg is always observed"
    ),
    "Locality tolerates more important neurons after the first task": "More active neurons are tolerated",
    "Locality lets more new neurons become important for tasks 2 and 3": "new neurons are becoming active as new tasks are learned",
    "Locality makes the third task lean less on the neurons of the first": (
        "very few neurons are able to become active … previous neurons … are easier to be re-used [without locality]"
    ),
    "The largest λ that keeps task 1's accuracy is within half a point of the best λ": (
        "remains close to the optimal performance on the current task, while utilizing the minimum capacity"
    ),
    "On CIFAR inhibition without the discount does not help: SNI and SLNI at most two points above No-Reg": (
        "when sharing is present …, a term to prevent … any interference is required"
    ),
    "On permuted MNIST every other variant works alone too: SNI, SNID and SLNI are two points or more above No-Reg": (
        "all the variants work nicely alone"
    ),
    "On CIFAR the discount adds two points or more": "resulting in a clearly better performance",
    "On CIFAR locality helps further: SLNID ≥ SNID": "The locality in SLNID improves the performance in the Cifar sequence",
    "Joint training is the upper bound": "can be seen as an upper bound",
    "SLNID, fc pretrained is ahead of MAS": "improves even when starting from a pretrained network and disabling dropout",
    "SLNID, fc random is ahead of MAS": "even with randomly initialized fully connected layers, SLNID improves 1.8 %",
    "Even without MAS, SLNID improves considerably, by more than four points (last model)": (
        "improves the performance considerably (by more than 4 %) even without importance weight regularizer"
    ),
    "SLNI, without the discount, improves the groups' own models on average": (
        "improves the individual models performance (72.14 % compared to 69.20 %)"
    ),
    "SLNI, without the discount, does not improve the last model": (
        "fails to improve the overall performance at the end of the sequence (63.54 % compared to 65.15 %)"
    ),
    "SLNID without MAS is already better than No-Reg with it (last model)": "at 70.75 %, … is already better than No-Reg reaching 66.33 %",
    "MAS adds only a moderate gain: at most two points, with and without SLNID (last model)": (
        "the improvement obtained by deploying the importance weight regularizer is moderate"
    ),
    "Less is forgotten without hard boundaries and without MAS than with both, as in section 4.2": (
        "there is less forgetting than in the scenario with hard task boundaries"
    ),
}

SIMILAR = "Similar conclusions can be drawn"
WORDS_AT = {  # where an experiment repeats a claim of another, the paper's words there
    (
        "fig-2-64",
        "Sparsity of activations beats sparsity of parameters: L1-Rep > L1-Param",
    ): "L1-Rep … is consistently better than L1-Param",
    ("fig-2-64", "Regularizers of the representation beat OrthReg, the best of those of the parameters"): (
        "more powerful for sequential learning than regularizers applied directly to the parameters"
    ),
    ("fig-2-64", "Regularizers of the representation are superior to all the others in all the tasks"): SIMILAR,
    (
        "fig-2-64",
        "SLNID is among the best: within half a point of DeCov and L1-Rep",
    ): "among the top average test accuracies … very close to L1-Rep",
    ("fig-2-64", "Maxout and LWTA improve slightly over ReLU"): "improve slightly over ReLU",
    ("fig-2-64", "Maxout and LWTA perform alike: within a point"): "Maxout and LWTA perform similarly",
    ("fig-3a-128", "SLNID is two points or more above DeCov"): "",
    ("fig-3a-128", "SLNID performs best: ahead of L1-Rep and of DeCov"): "achieves the best accuracies",
    ("fig-3a-128", "DeCov improves over No-Reg"): "DeCov and SLNID continue to improve over No-Reg",
}
PLACE_AT = {("fig-2-64", "SLNID with 64 units does better than No-Reg with 128"): "section 4.3"}  # else that of the experiment


def words_of(name: str, text: str) -> str:
    """Return the paper's words for a claim of an experiment; "" if it has none."""
    return WORDS_AT.get((name, text), WORDS.get(text, ""))
