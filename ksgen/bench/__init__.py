"""The paper's benchmark on the machine at hand: what is measured, how it is kept, and what is said of it.

    command -> runner -> contenders, clock -> log -> rows -> comparison -> report

Nothing outside `ksgen/commands` imports this package.
"""
