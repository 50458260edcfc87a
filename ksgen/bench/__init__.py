"""The paper's measurements on the machine at hand: what is measured, how it is kept, and what is said of it.

    command -> runner -> contenders, clock -> log -> rows -> comparison -> report

No room above imports this one.
"""
