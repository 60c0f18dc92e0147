"""Plans: memory, FLOPs and speed of a config before it runs.

stages        the plan of a stage, and its text
needs         what a stage needs of each device: memory by use, kernels
program_cost  cost of a traced program
devices       data sheets of devices, and grids of them for XLA's compilers
dummy_inputs  a config's experiment without its files
aot, hlo      programs compiled for devices that are not attached, and their text
"""
