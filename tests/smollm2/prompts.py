"""Twenty prompts of our own, short and long, prose, numbers and code."""

PROMPTS = (
    "What is the capital of Portugal, and what is it known for?",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain photosynthesis to a ten-year-old.",
    "Write a short poem about rain on a tin roof.",
    "List the planets of the solar system in order.",
    "Sam has 3 boxes with 12 pencils each and gives away 7. How many are left?",
    "Translate 'good morning, my friend' into Spanish and French.",
    "Give me a recipe for pancakes with four ingredients.",
    "What is the difference between a list and a tuple in Python?",
    "Summarise the story of the tortoise and the hare in two sentences.",
    "Name three ways to save electricity at home and say why each helps.",
    "Write an email to a colleague asking to move our meeting from Tuesday to Thursday.",
    "How do vaccines work?",
    "def reverse_words(sentence):\n    # complete this function",
    "Is 221 a prime number? Show how you check.",
    "Describe a sunset over the sea using no more than forty words.",
    "Write SQL that finds the five customers with the highest total orders.",
    "Hello!",
    "Continue the story: The last domino did not fall, and nobody could say why. The children "
    "had spent the whole afternoon setting them up along the corridor, around the corner, down "
    "the stairs and into the kitchen, where the cat was asleep. When the first one tipped over,",
)
