// What the words on the page mean; shown when the word is pointed at or focused.

export const DEFINITIONS = {
  FLOPs:
    "Floating-point operations of matrix products, convolutions, attention and recurrent layers; a multiply-add is two. A count, exact.",
  "FLOP/s": "FLOPs over seconds: a rate.",
  MFU: "Model FLOPs utilization: the FLOPs of forward and backward, over what the device could do at its peak in the step's wall time.",
  HFU: "Hardware FLOPs utilization: all FLOPs that kernels execute (recomputation and optimizer too, skipped halves of causal attention not), over what the device could do at its peak in the step's wall time.",
  "step time":
    "Wall time of one global step, from the end of one optimizer update to the end of the next. Validation, checkpoints and restarts of epochs are outside.",
  "samples/s": "Samples of all ranks that see different data, over the wall time of a step.",
  "tokens/s": "Tokens of all ranks that see different data, over the wall time of a step.",
  parameters: "Unique logical parameters of the whole model: tied ones once, shards by their full size.",
  "peak memory": "The most that was held in the counted step, as far as it was looked at.",
  forward: "Forward and loss, all micro-steps of a step together.",
  backward: "Autograd's call, all micro-steps of a step together.",
  optimizer: "The optimizer's update; DeepSpeed calls it step latency.",
  "data wait": "The training loop waits for its next batch: the exposed wait alone.",
  transfer: "The batch moves to the device.",
  "pipeline bubble": "Exchange with the other stages of the pipeline, and the wait for them.",
  other: "Callbacks, logging, schedulers, and whatever else the loop does between the named parts.",
  "global step": "From the end of one optimizer update to the end of the next.",
  "share of peak":
    "FLOP/s that were reached, over the device's dense peak for the dtypes that ran, forward and backward together.",
  time: "Forward and backward of the module in the traced step, with the modules inside: work launched there, on the device's clock if there is a device.",
  "own time": "The same without the modules inside.",
  "own FLOPs": "Without the modules inside.",
  bytes:
    "Inputs and outputs of every operator that ran, views left out; forward, backward, recomputation and optimizer.",
  "FLOPs a byte":
    "Arithmetic intensity: FLOPs over bytes read and written. Low values are bound by memory, high ones by arithmetic.",
  attainable:
    "What the roof allows at this intensity: the peak, or memory bandwidth times FLOPs a byte if that is less.",
  kept: "Bytes that the module's forward allocated and did not free: activations for the backward, and outputs.",
  calls: "How often it ran in the steps that were counted.",
  "at stake": "Share of the step that this advice could save and no other advice claims.",
  "counted step": "The step whose FLOPs and bytes were counted. Counting takes time, so its time is not used.",
  "timed steps":
    "Steps after the counted one, timed only at the borders of phases: every latency and rate is of these.",
  "traced step": "One more step under torch.profiler: times of modules, operators and kernels are of it.",
  straggler: "A rank that the others wait for.",
  exposed: "Communication that no computation hides.",
  outlier: "A step far above the others: over the median by four times the usual distance from it, and by 5% at least.",
  "tensor cores": "Whether the kernel's name says that it runs on tensor cores.",
  occupancy: "Estimated achieved occupancy, averaged over the kernel's runs by their durations.",
  "device own": "Kernels, copies and memsets that the operator launched itself.",
  "host own": "Host time in the operator, without the operators it called.",
  "self time":
    "In the operator itself, without the operators it called: on the device if there is one, else on the host.",
  reserved: "What a caching allocator had taken from the device.",
  "lower bound":
    "Something that ran could not be counted and may have spent FLOPs: totals and rates are at least these.",
  "traced step time":
    "Wall time of a step of the trace, from its mark to the end of the last kernel that was launched in it. The profiler itself takes time, so an untraced step is shorter.",
  "traced time": "From the first event of the trace to the last.",
  "memory at its peak": "The most that torch's allocator had given out at any moment of the trace.",
  "GPU utilization": "Time in which at least one kernel ran, over the steps' wall time.",
  "SM efficiency": "Estimated: how many streaming multiprocessors had a block, over the steps' wall time.",
  "blocks per SM": "Averaged over the kernels by their durations.",
  kernels: "Time in which a kernel ran that is not a collective's.",
  copies: "Copies to, from and on the device, where no kernel hides them.",
  memsets: "Memory that was filled on the device, where no kernel or copy hides it.",
  communication: "Collectives and what goes from one rank to another, where no kernel or copy hides them.",
  "runtime calls": "Calls on the host that launch work or wait for it, while the device does nothing.",
  "data loader": "The loop waits in its DataLoader, while the device and its launches leave the time.",
  "host operators": "Operators on the host, while nothing of the kinds before it runs.",
  "nothing recorded": "No event of these kinds ran: Python between operators, or what the profiler does not see.",
  "computation alone": "Kernels that do not communicate, and no communication.",
  "both at once": "Communication that computation hides.",
  "communication alone": "Communication that no computation hides: the device waits for it.",
  neither: "Neither computation nor communication.",
  "device total": "With what the operators that it called launched.",
  "host total": "Host time in the operator, with the operators it called.",
  "of a call": "Mean of all its calls, with what they called.",
  "of all calls": "All calls together, from start to end.",
  "bytes sent": "Of the larger side of each call; n/a where the trace does not say.",
  "transfer between ranks": "For each call the shortest of the ranks: time in which data can have moved.",
  "wait for ranks": "The rest of each call: waiting for the last rank to come.",
  "computes, of the median": "Its computation of a step, over the median of the ranks.",
  "launch delay": "From the end of the call on the host to the start on the device. Delays overlap.",
  "waiting for the host": "A pause that was ended by what was launched only after it had begun: the host was late.",
  "gap between kernels": "A pause under 30 µs before what had been launched in time.",
  "other pauses": "Longer pauses before what had been launched in time, and those whose launch is not known.",
  held: "Allocated before the peak and freed after it.",
  "allocated itself": "Allocated in it, without what it called; frees left out.",
  allocated: "Allocated, with what it called; frees left out.",
  "kept by it": "Allocated less freed, without what it called. Negative: it frees more.",
  "kept in all": "Allocated less freed, with what it called.",
  "steps of the trace": "Times are means over all of its steps.",
  "explained by memory":
    "At most so much of the row is the time that moving its bytes takes at the memory's bandwidth.",
} as const;

export type Word = keyof typeof DEFINITIONS;

export function definitionOf(word: string): string | undefined {
  return (DEFINITIONS as Record<string, string>)[word];
}
