"""Runs: stages of an experiment, trained, saved, resumed and evaluated.

experiment       all stages in order; the evaluation of a finished run
stages           one stage: start or resume, train, read again; its saved model
shapes           a stage as shapes, and what its clients send
loop             rounds of a federated stage, the only loop over them
central_stage    epochs of a central stage
sweep_results    table of a sweep's runs; vmapped_sweep: runs in one program
sweep_cells      runs of a sweep in a folder or bucket; leases: who trains which
workdir          the run directory: config, settings of its trained stages
locks            one writer of a run directory, or any number of readers
hosts            devices of several processes, and a test sum over them
compiled_programs  programs that a plan has compiled, for the run
report           charts of runs, and their files
checkpoint       checkpoints and the ledger of private rounds
data_digest      which images a stage was trained on
costs            communication, privacy, rounds to a target
evaluation_record  numbers, curves and images for reports
run_files        files of runs, read without JAX and checked by the types in records
sinks            logs of a stage; trackers: TensorBoard, W&B and the like
terminal         the live view; timing: seconds, goodput, speeds
buckets          runs in buckets: their manifests, claims and local copies
server_folder    rounds of a server of real clients
"""
