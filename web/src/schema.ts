// Written by types.mjs from docs/profile.schema.json; change the dataclasses in lightning_flops/schema.

export type WhatLightningFlopsWritesAsJSON = Profile | Comparison | TracesReport | TraceComparison;

/**
 * One window of one rank, counted, timed and divided; immutable.
 */
export interface Profile {
  /**
   * Of the JSON: ``SCHEMA_VERSION``.
   */
  schema_version: 5;
  /**
   * N: the counted step is the one that began after N steps of the fit.
   */
  profile_step: number;
  /**
   * The run's own x-axis value when the report came out.
   */
  report_step: number;
  context: RunContext;
  settings: ReportSettings;
  /**
   * Index of each counted step in the fit, the first step being 0.
   */
  counted_steps: number[];
  /**
   * Index of each timed step.
   */
  timed_steps: number[];
  /**
   * Whether signatures kept changing: counted and timed steps are then different samples of the same run.
   */
  variable: boolean;
  /**
   * Unique logical parameters of the whole model; None if no model was described.
   */
  params: number | null;
  /**
   * Of ``params``, those that need a gradient.
   */
  trainable_params: number | null;
  /**
   * Parameters that this rank holds in memory.
   */
  local_params: number | null;
  /**
   * Bytes of ``params`` by the dtype in which the parameters are kept; empty if no model was described.
   */
  parameter_bytes: {
    [k: string]: number;
  };
  /**
   * Batches in one step, mean over the counted steps.
   */
  micro_steps: number;
  /**
   * Samples of this rank in one step, mean over the timed steps (the counted ones if none was timed).
   */
  samples: number | null;
  /**
   * Tokens of this rank in one step, likewise.
   */
  tokens: number | null;
  flops: StepFlops;
  flops_total: StepFlops;
  /**
   * None if one step was counted, or if the steps were not counted apart.
   */
  flops_spread: FlopSpread | null;
  bytes_total: PhaseBytes;
  /**
   * Most hardware FLOPs first.
   */
  dtypes: DtypeFlops[];
  /**
   * Dense peak of this rank's device in every dtype for which it is known, used here or not.
   */
  peaks_flops_per_sec: {
    [k: string]: number;
  };
  /**
   * Seconds a step's model FLOPs would take at the peak: divided by a step's seconds it is MFU.
   */
  model_flops_peak_sec: number | null;
  /**
   * The same of hardware FLOPs: HFU.
   */
  hardware_flops_peak_sec: number | null;
  /**
   * None if no step was timed.
   */
  timing: TimingProfile | null;
  /**
   * Where peak x time went: rows that add up to a step's wall time. None if no step was timed.
   */
  budget: Budget | null;
  /**
   * Bandwidth of the memory of this rank's device, as its vendor publishes it; None if it is not known.
   */
  memory_bytes_per_sec: number | null;
  /**
   * Of this rank's GPU while steps were timed; None without an NVIDIA GPU or NVML (the extra ``nvidia``).
   */
  energy: Energy | null;
  rates: Rates;
  /**
   * Why a rate (by its field's name) is None, in a few words.
   */
  unavailable: {
    [k: string]: string;
  };
  /**
   * Whether FLOPs and their rates are lower bounds: work that may be matmul-like could not be counted.
   */
  lower_bound: boolean;
  /**
   * In tree order, the root first; sums over all counted steps.
   */
  modules: ModuleProfile[];
  outside: PhaseFlops;
  /**
   * Most FLOPs first.
   */
  operators: OperatorProfile[];
  /**
   * Operators that ran and are in no sum, over all counted steps.
   */
  uncounted: {
    [k: string]: UncountedOperator;
  };
  /**
   * Of this rank in the counted step; None if it was not looked at.
   */
  memory: MemoryRecord | null;
  /**
   * One more step, which ran under torch.profiler; None if there is none.
   */
  traced: TracedStep | null;
  /**
   * All ranks of the job together; None where this rank's is the only profile at hand.
   */
  ranks: RanksProfile | null;
  /**
   * What holds the run back, the most at stake first.
   */
  advice: Advice[];
  /**
   * What is missing or degraded, in sentences.
   */
  notes: string[];
}
/**
 * Where a profile was taken.
 */
export interface RunContext {
  /**
   * ``lightning.pytorch``, ``pytorch_lightning``, ``transformers``, ``deepspeed`` or ``torch``.
   */
  framework: string;
  /**
   * Installed version of that framework.
   */
  framework_version: string;
  /**
   * Of the torch that ran.
   */
  torch_version: string;
  /**
   * ``cpu``, ``cuda`` …
   */
  device_type: string;
  /**
   * As the driver has it; the processor's architecture on a CPU.
   */
  device_name: string;
  /**
   * The framework's name for it, such as ``bf16-mixed``.
   */
  precision: string;
  /**
   * Name of the machine; empty if nobody looked.
   */
  host: string;
  /**
   * Of the process whose profile this is.
   */
  rank: number;
  /**
   * Ranks of the run.
   */
  world_size: number;
  /**
   * Ranks that see different data.
   */
  dp_size: number;
  /**
   * Ranks that share each layer (tensor parallel).
   */
  tp_size: number;
  /**
   * Stages of the pipeline.
   */
  pp_size: number;
  /**
   * This rank's stage of the pipeline, the first being 0; counts, times and parameters are those of the stage.
   */
  pp_rank: number;
  /**
   * Ranks that share each sequence (context parallel).
   */
  cp_size: number;
  /**
   * Ranks that hold different parts of the same sequences (Ulysses).
   */
  sp_size: number;
  /**
   * Ranks that hold different experts; they divide the dp_size.
   */
  ep_size: number;
  /**
   * Samples of one batch on this rank; None if not known.
   */
  micro_batch_size: number | null;
  /**
   * Batches whose gradients make one update.
   */
  accumulate: number;
  /**
   * The framework's class that spreads the work; empty without one.
   */
  strategy: string;
  /**
   * What ran. In a loop without training a step is one batch, and has no backward and no optimizer.
   */
  loop: "training" | "predict" | "test" | "validate";
}
/**
 * The settings that decide what was counted, how it was timed and what a report shows.
 */
export interface ReportSettings {
  /**
   * Deepest module level in the text report; -1 for all.
   */
  module_depth: number;
  /**
   * Modules listed at each level of the aggregated profile.
   */
  top_modules: number;
  /**
   * Whether the text report has the module tree.
   */
  detailed: boolean;
  /**
   * Forwards repeated in the backward, for the estimated backward alone.
   */
  recompute_fwd_factor: number;
  /**
   * Whether causal attention counts its whole score matrix or half of it.
   */
  causal_attention: "full" | "half";
  /**
   * How many timed steps were asked for.
   */
  timing_steps: number;
  /**
   * Whether the user gave ``peak_flops_per_sec``; if not, peaks are the vendors'.
   */
  peak_given: boolean;
  /**
   * Whether the user gave ``memory_bytes_per_sec``; if not, it is the vendor's.
   */
  memory_given: boolean;
}
/**
 * FLOPs of one global step on this rank; a multiply-add is two.
 */
export interface StepFlops {
  /**
   * Every forward that runs inside a step.
   */
  forward: number;
  /**
   * What autograd ran, without what it repeated of the forward.
   */
  backward: number;
  /**
   * What the backward repeated of the forward: activation checkpointing, fused attention's score matrix.
   */
  recompute: number;
  /**
   * Inside optimizer steps.
   */
  optimizer: number;
  /**
   * Of the four phases' FLOPs, what fused masked attention does not execute.
   */
  skipped: number;
  /**
   * Of the forward's FLOPs, those that no backward can follow.
   */
  without_backward: number;
  /**
   * (2 + recompute_fwd_factor) x (forward - without_backward): stands for backward and recompute together.
   */
  backward_estimated: number;
  /**
   * Forward + backward: the numerator of MFU.
   */
  model: number;
  /**
   * All four phases - skipped: what the kernels execute, the numerator of HFU.
   */
  hardware: number;
}
/**
 * How much several counted steps differ, phase by phase.
 */
export interface FlopSpread {
  minimum: PhaseFlops;
  maximum: PhaseFlops;
  /**
   * The least of forward + backward.
   */
  model_minimum: number;
  /**
   * The most of forward + backward.
   */
  model_maximum: number;
}
/**
 * FLOPs by phase; a multiply-add is two.
 */
export interface PhaseFlops {
  /**
   * In a step's forwards.
   */
  forward: number;
  /**
   * In what autograd ran, less what it repeated of the forward.
   */
  backward: number;
  /**
   * In what the backward repeated of the forward.
   */
  recompute: number;
  /**
   * Inside optimizer steps.
   */
  optimizer: number;
}
/**
 * Bytes by phase: the inputs and outputs of every operator that ran, views left out.
 */
export interface PhaseBytes {
  /**
   * In a step's forwards.
   */
  forward: number;
  /**
   * In what autograd ran, less what it repeated of the forward.
   */
  backward: number;
  /**
   * In what the backward repeated of the forward.
   */
  recompute: number;
  /**
   * Inside optimizer steps.
   */
  optimizer: number;
}
/**
 * FLOPs in one dtype of arithmetic, over all counted steps.
 */
export interface DtypeFlops {
  /**
   * Effective dtype of the arithmetic, such as ``bfloat16`` or ``tf32``.
   */
  dtype: string;
  /**
   * Forward + backward.
   */
  model: number;
  /**
   * What the kernels execute.
   */
  hardware: number;
  /**
   * Dense peak of one device in this dtype; None if it is not known.
   */
  peak_flops_per_sec: number | null;
}
/**
 * Where the time of a step goes on this rank, means over the timed steps; None where phases are mixed.
 */
export interface TimingProfile {
  /**
   * How many steps the means are over.
   */
  timed_steps: number;
  /**
   * Tile the step: their means add up to ``global_step_sec``.
   */
  parts: PartTiming[];
  global_step: PartTiming;
  /**
   * The training loop waits for its next batch.
   */
  data_wait_sec: number | null;
  /**
   * The batch moves to the device.
   */
  transfer_sec: number | null;
  /**
   * Forward and loss, all micro-steps of a step together.
   */
  forward_sec: number | null;
  /**
   * Autograd's call, all micro-steps of a step together.
   */
  backward_sec: number | null;
  /**
   * Exchange with the other stages of a pipeline, and the wait for them; zero where there are none.
   */
  bubble_sec: number | null;
  /**
   * DeepSpeed prints it as "step latency".
   */
  optimizer_sec: number | null;
  /**
   * Callbacks, logging, schedulers, and whatever else the loop does between the named parts.
   */
  other_sec: number | null;
  /**
   * Forward and backward together; known also where the two cannot be told apart.
   */
  forward_backward_sec: number | null;
  /**
   * Forward, backward and optimizer together: DeepSpeed's "iter latency".
   */
  iter_sec: number | null;
  /**
   * Wall time from the end of one update to the end of the next, less what is excluded.
   */
  global_step_sec: number;
  /**
   * Host seconds a step inside the data loader, hidden behind device work or not.
   */
  reader_sec: number | null;
  /**
   * Wall time between the timed steps that belongs to none of them, summed, by cause.
   */
  excluded_sec: {
    [k: string]: number;
  };
}
/**
 * Seconds of one part of a step, over the timed steps.
 */
export interface PartTiming {
  /**
   * The phase; phases that cannot be told apart stand together, joined by ``" + "``.
   */
  name: string;
  /**
   * Total over the timed steps / their number.
   */
  mean_sec: number;
  /**
   * Fraction of the global step's mean; None if that is zero.
   */
  share: number | null;
  /**
   * Of a single step.
   */
  minimum_sec: number;
  /**
   * Of the timed steps.
   */
  median_sec: number;
  /**
   * Of a single step.
   */
  maximum_sec: number;
  /**
   * Standard deviation of the timed steps; 0 for a single one.
   */
  deviation_sec: number;
  /**
   * Of each timed step, in the order of ``Profile.timed_steps``. Empty in a file of schema version 3.
   */
  steps_sec: number[];
}
/**
 * One account of one step of this rank: its rows add up to ``wall_ns`` exactly.
 */
export interface Budget {
  /**
   * Wall time of a step: ``timing.global_step_sec``, to the nearest nanosecond.
   */
  wall_ns: number;
  /**
   * The FLOPs at the peak first. Rows that took no time are left out.
   */
  rows: BudgetRow[];
  /**
   * Index of the step whose trace divides the phases; their times are those of the timed steps. None without one.
   */
  traced_step: number | null;
  /**
   * Whether the peak is known; if not, the rows are times only.
   */
  knows_peak: boolean;
  /**
   * Beside the step: the run while the window was open.
   */
  run: RunShare[];
  /**
   * What was joined, and why, in sentences.
   */
  notes: string[];
}
/**
 * One row of the budget: so much of a step's wall time.
 */
export interface BudgetRow {
  /**
   * ``model``: useful model FLOPs at the peak; its share of the step is MFU. ``padding``: what of the model FLOPs was spent on padding, where that is known: then ``model`` is without it, and MFU is the share of both. ``recompute``, ``optimizer_flops``: these FLOPs at the peak. ``skipped``: below zero, for FLOPs in ``model`` that fused masked attention does not execute; above zero where ``causal_attention="half"`` counts fewer than are executed. ``matmul``: what matmul-like operators take beyond the rows above it, all of their time if the peak is not known. ``other_operators``: all others. ``operators``: both, where they cannot be told apart. ``communication``, ``copies``: what nothing hides. ``idle``: nothing runs, while the host prepares. ``compute``: all of forward, backward and optimizer that cannot be told apart. ``bubble``, ``data_wait``, ``transfer``, ``other``: these parts of a step.
   */
  key:
    | "model"
    | "padding"
    | "recompute"
    | "optimizer_flops"
    | "skipped"
    | "matmul"
    | "other_operators"
    | "operators"
    | "communication"
    | "copies"
    | "idle"
    | "compute"
    | "bubble"
    | "data_wait"
    | "transfer"
    | "other";
  /**
   * The same for people, for this device.
   */
  label: string;
  /**
   * Of one step. Below zero in ``skipped`` alone; the rows add up to the step.
   */
  time_ns: number;
  /**
   * The rows that are in this one because nothing tells them apart; empty for a row that stands for itself.
   */
  joined: (
    | "model"
    | "padding"
    | "recompute"
    | "optimizer_flops"
    | "skipped"
    | "matmul"
    | "other_operators"
    | "operators"
    | "communication"
    | "copies"
    | "idle"
    | "compute"
    | "bubble"
    | "data_wait"
    | "transfer"
    | "other"
  )[];
  /**
   * Of ``other_operators``: at most so much of it is explained by moving their bytes at the memory's bandwidth. None in other rows, and where the bandwidth is not known.
   */
  memory_ns: number | null;
  /**
   * Rules of the advice in this profile that lower this row, in its order.
   */
  advice: string[];
}
/**
 * What the run did in a part of its wall time, while the profiler's window was open.
 */
export interface RunShare {
  /**
   * ``training``: the timed steps. ``validation``, ``checkpoint``, ``between_epochs``, ``elsewhere`` (what the user named): between these. ``profiler``: by how much the counted and the traced steps took longer than as many others. ``report``: reading the trace and making the report; writing it is not in it.
   */
  key: "training" | "validation" | "checkpoint" | "between_epochs" | "profiler" | "report" | "elsewhere";
  /**
   * The same for people.
   */
  label: string;
  /**
   * All of it together.
   */
  time_ns: number;
}
/**
 * What this rank's GPU spent while steps were timed, and its clock: of the whole GPU, whoever used it.
 */
export interface Energy {
  /**
   * Over which the GPU's counters were read, on the host.
   */
  measured_sec: number;
  /**
   * Spent in them, by the GPU's own counter.
   */
  joules: number | null;
  /**
   * joules / measured_sec
   */
  watts: number | null;
  /**
   * watts x global_step_sec
   */
  joules_per_step: number | null;
  /**
   * hardware FLOPs of a step / joules_per_step
   */
  flops_per_joule: number | null;
  /**
   * joules_per_step / samples of this rank in a step
   */
  joules_per_sample: number | null;
  /**
   * joules_per_step / tokens of this rank in a step
   */
  joules_per_token: number | null;
  /**
   * Mean of what the multiprocessors' clock was between timed steps.
   */
  clock_mhz: number | null;
  /**
   * How many readings that is the mean of.
   */
  clock_readings: number;
  /**
   * The highest that this GPU can have.
   */
  highest_clock_mhz: number | null;
  /**
   * Share of measured_sec in which power held the clock below what was asked for.
   */
  power_limited_share: number | null;
  /**
   * Share of measured_sec in which heat did.
   */
  heat_limited_share: number | null;
  /**
   * Why the clock was not higher, in words, and the share of the readings at which this held.
   */
  reasons: {
    [k: string]: number;
  };
  /**
   * Why a figure (by its field's name) is None, in a few words.
   */
  unavailable: {
    [k: string]: string;
  };
}
/**
 * Every ratio of a profile, per step; None where numerator or denominator is not known.
 */
export interface Rates {
  /**
   * forward / forward_sec
   */
  forward_flops_per_sec: number | null;
  /**
   * (backward + recompute) / backward_sec
   */
  backward_flops_per_sec: number | null;
  /**
   * estimated backward / backward_sec
   */
  backward_flops_per_sec_estimated: number | null;
  /**
   * (forward + backward + recompute) / (forward_sec + backward_sec)
   */
  forward_backward_flops_per_sec: number | null;
  /**
   * (forward + estimated backward) / (forward_sec + backward_sec)
   */
  forward_backward_flops_per_sec_estimated: number | null;
  /**
   * hardware FLOPs / iter_sec
   */
  iter_flops_per_sec: number | null;
  /**
   * (forward + estimated backward) / iter_sec
   */
  iter_flops_per_sec_estimated: number | null;
  /**
   * samples / global_step_sec
   */
  samples_per_sec: number | null;
  /**
   * samples / iter_sec: DeepSpeed's figure
   */
  iter_samples_per_sec: number | null;
  /**
   * tokens / global_step_sec
   */
  tokens_per_sec: number | null;
  /**
   * tokens_per_sec / world_size
   */
  tokens_per_sec_per_device: number | null;
  /**
   * Sum over dtypes of model FLOPs / peak of that dtype, / global_step_sec; 1 is the peak.
   */
  mfu: number | null;
  /**
   * The same of hardware FLOPs.
   */
  hfu: number | null;
  /**
   * data_wait_sec / global_step_sec
   */
  data_wait_ratio: number | null;
}
/**
 * One module of the model; its FLOPs, bytes and calls are sums over all counted steps.
 */
export interface ModuleProfile {
  /**
   * Qualified name; the root is ``""``.
   */
  name: string;
  /**
   * Class of the module; ``""`` if it did work but the model does not list it.
   */
  type_name: string;
  /**
   * What the module says of itself, such as ``in_features=8, out_features=4``.
   */
  extra_repr: string;
  /**
   * Levels below the root, which has 0.
   */
  depth: number;
  /**
   * Unique logical parameters of the module and all below it.
   */
  params: number;
  /**
   * Of ``params``, those that need a gradient.
   */
  trainable_params: number;
  /**
   * Parameters that this rank holds in memory.
   */
  local_params: number;
  /**
   * How often its forward was entered, recomputation left out.
   */
  calls: number;
  own: PhaseFlops;
  total: PhaseFlops;
  total_bytes: PhaseBytes;
  /**
   * Name under which the same module object stands earlier in the tree.
   */
  alias_of: string | null;
  /**
   * Its times in the traced step; None if no step was traced, or it was not called there.
   */
  times: ModuleTimes | null;
  /**
   * With the modules below it; None if it spent no FLOPs.
   */
  roofline: Roofline | null;
}
/**
 * Seconds of one module in one step, with the modules below it, unless the name says *own*.
 */
export interface ModuleTimes {
  /**
   * ``device``: time that work launched in the module ran on the device. ``host``: on the host, without a device. ``borders``: a clock read at the module's borders, on the device's stream, or on the host without a device.
   */
  clock: "host" | "device" | "borders";
  /**
   * All of its forward calls together.
   */
  forward_sec: number;
  /**
   * Without the modules below it.
   */
  own_forward_sec: number;
  /**
   * With what the backward repeats of the forward, without gradient accumulation. None without a trace.
   */
  backward_sec: number | null;
  /**
   * Without the modules below it; None without a trace.
   */
  own_backward_sec: number | null;
  /**
   * Kernels that its forward launched; None without a device.
   */
  forward_kernels: number | null;
  /**
   * Kernels that its backward launched; None without a device.
   */
  backward_kernels: number | null;
  /**
   * Forward FLOPs of the counted step / seconds; None where there are none, or the two steps differ.
   */
  forward_flops_per_sec: number | null;
  /**
   * Backward and recomputed FLOPs / seconds.
   */
  backward_flops_per_sec: number | null;
  /**
   * Share of the device's peak, for the dtypes it computes in; None if one of them has no known peak.
   */
  forward_utilization: number | null;
  /**
   * The same of the backward.
   */
  backward_utilization: number | null;
}
/**
 * One module or operator in the roofline model: forward, backward and recomputation together.
 */
export interface Roofline {
  /**
   * Arithmetic intensity: FLOPs / bytes that its operators read and write, each counted by itself. None where no bytes were seen.
   */
  flops_per_byte: number | null;
  /**
   * FLOPs of the counted step / seconds of the traced step; None where the two differ, or without a trace.
   */
  achieved_flops_per_sec: number | null;
  /**
   * The least of the peak of its dtypes and flops_per_byte x the memory's bandwidth; None where one of them is not known. What stays in a cache or is fused moves fewer bytes, so more than this can be achieved.
   */
  attainable_flops_per_sec: number | null;
}
/**
 * One operator in all modules, over all counted steps.
 */
export interface OperatorProfile {
  /**
   * Name without overload, such as ``aten.mm``.
   */
  operator: string;
  /**
   * How often it ran.
   */
  calls: number;
  flops: PhaseFlops;
  /**
   * Dtypes of its arithmetic, sorted.
   */
  dtypes: string[];
  /**
   * Its inputs.
   */
  bytes_read: number;
  /**
   * Its outputs.
   */
  bytes_written: number;
  /**
   * None if it spent no FLOPs.
   */
  roofline: Roofline | null;
}
/**
 * An operator that ran, has no FLOP formula and is not known to be free, or whose formula failed.
 */
export interface UncountedOperator {
  /**
   * How often it ran.
   */
  calls: number;
  /**
   * Sorted names of the modules it ran in.
   */
  modules: string[];
  /**
   * Elements of all tensors it returned.
   */
  output_elements: number;
  /**
   * It may have spent FLOPs (it takes or makes floating-point tensors, say), so totals that lack it are lower bounds.
   */
  heavy: boolean;
}
/**
 * Memory of this rank in the counted step, and what it is for, in bytes.
 */
export interface MemoryRecord {
  /**
   * By tensors on the device, or by the whole process on the host.
   */
  kind: "allocated" | "resident";
  /**
   * Each phase of the counted step.
   */
  phases: PhaseMemory[];
  /**
   * Most that was ever held, as far as the device's books tell: no phase went above it. They begin with the process, or anew where the user has reset their peak before the counted step.
   */
  run_peak_bytes: number | null;
  /**
   * Most that a caching allocator ever took from the device; None where there is none.
   */
  run_reserved_peak_bytes: number | null;
  /**
   * Of this rank's shards.
   */
  parameter_bytes: number;
  /**
   * The model's buffers.
   */
  buffer_bytes: number;
  /**
   * Largest after a backward; None where gradients are not kept on the parameters.
   */
  gradient_bytes: number | null;
  /**
   * States, and copies of parameters that the optimizer keeps for itself; None if not known.
   */
  optimizer_bytes: number | null;
  /**
   * Held more at the end of a forward than at its start: activations kept for the backward, and the outputs. None on the host, whose resident memory does not tell.
   */
  kept_by_forward_bytes: number | null;
}
/**
 * Memory of one phase of the counted step, in bytes; the largest over its micro-steps.
 */
export interface PhaseMemory {
  /**
   * Of the phase.
   */
  name: string;
  /**
   * Held when the phase ended.
   */
  current_bytes: number | null;
  /**
   * Most that was held in it; None unless the phase set a new peak of the whole run.
   */
  peak_bytes: number | null;
  /**
   * What a caching allocator had taken from the device when the phase ended; None where there is none.
   */
  reserved_bytes: number | null;
  /**
   * Most that it had taken in the phase; None unless that was a new peak of the whole run.
   */
  reserved_peak_bytes: number | null;
}
/**
 * A step, or several in a row, that ran under torch.profiler, or whose modules a clock timed in its place.
 */
export interface TracedStep {
  /**
   * Steps of the fit before it.
   */
  index: number;
  /**
   * It has the counted step's signature, so FLOPs of the one over seconds of the other is a rate.
   */
  like_counted: boolean;
  /**
   * Paths or URLs where traces were kept, the one that *tables* is of first; empty if none was to be.
   */
  files: string[];
  /**
   * None if there is no trace.
   */
  tables: TraceReport | null;
  /**
   * Own seconds of each module's forward by a clock at module borders; None unless that stands in for a trace.
   */
  own_forward_sec: {
    [k: string]: number;
  } | null;
  /**
   * Where the time went, and what of it was communication; empty if there is no trace.
   */
  parts: TracedPart[];
  /**
   * What filled these parts; None if there is no trace, or if the trace does not show the device.
   */
  filling: StepFilling | null;
  /**
   * Every call of every collective: what another rank's are matched with. Empty in a run of one rank.
   */
  collectives: CollectiveCalls[];
}
/**
 * Every table of one trace; a table that the trace has nothing for is None.
 */
export interface TraceReport {
  /**
   * The trace's file or URL.
   */
  source: string;
  /**
   * None where the trace does not say.
   */
  rank: number | null;
  /**
   * How many there are.
   */
  events: number;
  step_times: StepTimes;
  /**
   * Forward and backward of each module; None where the trace's modules are not marked.
   */
  modules: ModuleTable | null;
  /**
   * How well each device was used over the steps; None without a device.
   */
  device_metrics: DeviceMetrics[] | null;
  device_summary: DeviceSummary;
  /**
   * All events by kind.
   */
  overview: OverviewRow[];
  model_summary: ModelSummary;
  /**
   * None when the trace has no collectives, or is of a run of one rank.
   */
  overlap: Overlap | null;
  /**
   * Each collective; None when the trace has none.
   */
  collectives: CollectiveRow[] | null;
  /**
   * All kernels together; None without a device.
   */
  kernel_summary: KernelSummary | null;
  /**
   * Each kernel, the longest first; None without a device.
   */
  kernels: KernelRow[] | null;
  /**
   * Each operator, the longest first; None when none was recorded.
   */
  operators: OperatorRow[] | null;
  /**
   * What each operator allocated and freed; None where memory was not recorded.
   */
  memory: MemoryRow[] | null;
  /**
   * What each module allocated and freed; None where memory or modules were not recorded.
   */
  module_memory: ModuleMemoryRow[] | null;
  /**
   * Copies and memsets by kind; None without a device.
   */
  transfers: TransferRow[] | null;
  /**
   * Each ``record_function`` scope; None when there is none.
   */
  user_scopes: UserScopeRow[] | null;
  /**
   * Pauses of each device and stream, by cause; None without a device.
   */
  idle: IdleTime[] | null;
  /**
   * Launches by kind; None when none is known.
   */
  launches: LaunchRow[] | null;
  /**
   * What is missing or degraded, in sentences.
   */
  notes: string[];
  /**
   * Memory of each device over time; None where memory was not recorded.
   */
  memory_curves: MemoryCurve[] | null;
  /**
   * Each operator by the sizes of its inputs, the longest first; None where shapes were not recorded.
   */
  operators_by_shape: OperatorShapeRow[] | null;
  /**
   * FLOPs from the shapes in the trace; None where it has none, and for a step that the run itself counted.
   */
  flops: TraceFlops | null;
}
/**
 * Every step's breakdown, and their mean.
 */
export interface StepTimes {
  /**
   * False when the trace has no profiler steps; the whole trace is then one step.
   */
  marked: boolean;
  /**
   * In the order of the trace.
   */
  steps: StepTime[];
  mean: StepTime;
}
/**
 * Microseconds of a step by what filled them; the parts add up to the step's wall time.
 */
export interface StepTime {
  /**
   * The profiler's number of the step; None for the mean of several, and where the whole trace stands as one.
   */
  number: number | null;
  /**
   * Of the whole step.
   */
  wall_us: number;
  /**
   * Kernels other than collectives'. None, like the next two and the runtime's, when the trace has no device.
   */
  kernel_us: number | null;
  /**
   * Copies to, from and on the device that no kernel hides.
   */
  memcpy_us: number | null;
  /**
   * Memory filled on the device.
   */
  memset_us: number | null;
  /**
   * None when the trace has no collectives at all.
   */
  communication_us: number | null;
  /**
   * Calls on the host that launch work or wait for it.
   */
  runtime_us: number | null;
  /**
   * None when the trace shows no ``DataLoader``.
   */
  data_loader_us: number | null;
  /**
   * Operators on the host; None when none was recorded.
   */
  cpu_us: number | null;
  /**
   * What is left: no event of these kinds ran.
   */
  other_us: number;
}
/**
 * Where the time of forward and backward went, module by module; there when the trace's modules are marked.
 */
export interface ModuleTable {
  /**
   * ``device``: time in which work that was launched there ran, overlaps counted once. ``host``: without a device.
   */
  clock: "host" | "device";
  /**
   * All times and counts are of so many steps together.
   */
  steps: number;
  /**
   * By name, the root first.
   */
  rows: ModuleRow[];
  /**
   * All of the forward; its own work outside every module's call is the root's.
   */
  forward_us: number;
  /**
   * All of the backward: the modules', gradient accumulation, and what is unattributed.
   */
  backward_us: number;
  /**
   * The optimizer, without forward and backward in its closure.
   */
  optimizer_us: number;
  /**
   * Adding gradients to parameters, and the hooks that run there.
   */
  gradient_accumulation_us: number;
  /**
   * Collectives in the backward that no module's node waits for. They may run beside gradient accumulation.
   */
  backward_communication_us: number;
  /**
   * Operators that ran in the backward outside of autograd's nodes: what wrappers put off to the backward's end.
   */
  backward_outside_nodes_us: number;
  /**
   * Work in the forward that no module's call accounts for.
   */
  unattributed_forward_us: number;
  /**
   * The autograd engine between nodes, hooks in Python there, and nodes whose forward is not in the trace.
   */
  unattributed_backward_us: number;
}
/**
 * One module over all steps of a trace; totals are with the modules below it, own times without.
 */
export interface ModuleRow {
  /**
   * Qualified name; the root is ``""``.
   */
  name: string;
  /**
   * Forward calls; those that a backward repeats are none.
   */
  calls: number;
  /**
   * All of its forward calls together.
   */
  forward_us: number;
  /**
   * Without the modules below it.
   */
  own_forward_us: number;
  /**
   * With what the backward repeats of the forward (activation checkpointing).
   */
  backward_us: number;
  /**
   * Without the modules below it.
   */
  own_backward_us: number;
  /**
   * With the modules below it; None without a device.
   */
  forward_kernels: number | null;
  /**
   * With the modules below it; None without a device.
   */
  backward_kernels: number | null;
  /**
   * File and line of its class's ``forward``, ``net.py:7``; None where Python's calls were not recorded.
   */
  source: string | null;
}
/**
 * One device over all steps; ratios are of the steps' wall time.
 */
export interface DeviceMetrics {
  /**
   * Its number.
   */
  device: number;
  /**
   * As the driver has it; None where the trace does not say.
   */
  name: string | null;
  /**
   * Streaming multiprocessors; None where the trace does not say.
   */
  sm_count: number | null;
  /**
   * Union of the kernels within the steps ÷ steps.
   */
  utilization: number;
  /**
   * Estimated: ∫ min(1, Σ blocks per SM of the kernels then running) dt ÷ steps; None if a kernel lacks them.
   */
  sm_efficiency: number | null;
  /**
   * Estimated achieved occupancy, averaged over the kernels with their durations as weights.
   */
  occupancy_percent: number | null;
  /**
   * Averaged in the same way.
   */
  blocks_per_sm: number | null;
}
/**
 * How busy processors were from the first event of the trace to the last.
 */
export interface DeviceSummary {
  /**
   * From the first event to the last.
   */
  elapsed_us: number;
  /**
   * The process's CPU time ÷ elapsed; up to the number of cores. None when the trace does not say, like the next.
   */
  cpu_process_ratio: number | null;
  /**
   * Busy ÷ (busy + idle) time of all cores.
   */
  cpu_system_ratio: number | null;
  /**
   * Each device that ran a kernel; None without one.
   */
  devices: DeviceUse[] | null;
}
/**
 * How long one device ran kernels while the trace was taken.
 */
export interface DeviceUse {
  /**
   * Its number.
   */
  device: number;
  /**
   * Union of kernels ÷ elapsed time of the whole trace.
   */
  utilization: number;
}
/**
 * All events of one kind inside the steps; moments that several of them share count once.
 */
export interface OverviewRow {
  /**
   * Of the events, such as ``Kernel`` or ``Operator``.
   */
  kind: string;
  /**
   * Where they ran.
   */
  side: "host" | "device";
  /**
   * How many events there are.
   */
  calls: number;
  /**
   * Union of the events.
   */
  time_us: number;
  /**
   * Of the steps; kinds overlap and contain one another, so these add up to no whole.
   */
  ratio: number | null;
}
/**
 * Phases of the steps, on the host's clock and by the device work they launched.
 */
export interface ModelSummary {
  step: PhaseRow;
  /**
   * Fetching batches.
   */
  data_loader: PhaseRow | null;
  /**
   * The forward.
   */
  forward: PhaseRow | null;
  /**
   * The backward.
   */
  backward: PhaseRow | null;
  /**
   * The optimizer's step.
   */
  optimizer: PhaseRow | null;
  others: Remainder;
}
/**
 * One phase over all steps; ratios are of the steps.
 */
export interface PhaseRow {
  /**
   * How often the phase was entered.
   */
  calls: number;
  host: Durations;
  /**
   * Kernels, copies and memsets launched in the phase; None without a device.
   */
  device: Durations | null;
  /**
   * ``scopes``: named in the trace. ``operators``: from the operators that ran with gradients and in autograd.
   */
  source: "scopes" | "operators";
}
/**
 * Lengths of several events; min <= mean <= max, and total = calls × mean.
 */
export interface Durations {
  /**
   * All of them together.
   */
  total_us: number;
  /**
   * Of one of them.
   */
  mean_us: number;
  /**
   * Of the longest.
   */
  max_us: number;
  /**
   * Of the shortest.
   */
  min_us: number;
  /**
   * Total over the whole that the table names; None where that whole is empty.
   */
  ratio: number | null;
}
/**
 * What of the steps is in no phase.
 */
export interface Remainder {
  /**
   * On the host's clock.
   */
  host_us: number;
  /**
   * Of the steps.
   */
  host_ratio: number | null;
  /**
   * Device work launched there; None without a device.
   */
  device_us: number | null;
  /**
   * Of the steps; None without a device.
   */
  device_ratio: number | null;
}
/**
 * Wall time of the steps, split by computation and communication; overlapping events are merged.
 */
export interface Overlap {
  /**
   * Of all steps together.
   */
  wall_us: number;
  /**
   * Kernels that do not communicate; without a device, operators on the host that neither start nor await any.
   */
  computation_us: number;
  /**
   * Collectives and what goes from one rank to another.
   */
  communication_us: number;
  /**
   * Both at once.
   */
  overlap_us: number;
  /**
   * Neither.
   */
  other_us: number;
  /**
   * Overlap ÷ communication; None without communication.
   */
  overlap_ratio: number | null;
}
/**
 * All calls of one collective in one trace.
 */
export interface CollectiveRow {
  /**
   * Of the collective.
   */
  name: string;
  /**
   * How often it was called.
   */
  calls: number;
  /**
   * Of the larger side of each call, summed; None where the trace does not say.
   */
  bytes: number | null;
  latency: Durations;
}
/**
 * All kernels together.
 */
export interface KernelSummary {
  /**
   * How many kernels ran.
   */
  calls: number;
  /**
   * Time in all of them, added up.
   */
  total_us: number;
  /**
   * Time in kernels on tensor cores ÷ time in all kernels but collectives'.
   */
  tensor_core_ratio: number | null;
  /**
   * Time in kernels whose operators can use tensor cores ÷ the same.
   */
  tensor_core_eligible_ratio: number | null;
  /**
   * Kernels shorter than ``SHORT_KERNEL_LIMIT_US`` ÷ kernels.
   */
  short_calls_ratio: number | null;
  /**
   * Their time ÷ the time of all kernels.
   */
  short_time_ratio: number | null;
}
/**
 * All runs of one kernel.
 */
export interface KernelRow {
  /**
   * As compiled.
   */
  name: string;
  /**
   * How often it ran.
   */
  calls: number;
  device: Durations;
  /**
   * Whether its name says that it runs on tensor cores.
   */
  tensor_cores: boolean;
  /**
   * Whether an operator that can use tensor cores launched it at least once.
   */
  tensor_cores_eligible: boolean;
  /**
   * Whether it communicates.
   */
  collective: boolean;
  /**
   * Averaged over its runs with their durations as weights; None where the trace does not say.
   */
  blocks_per_sm: number | null;
  /**
   * Estimated achieved occupancy, averaged in the same way.
   */
  occupancy_percent: number | null;
  /**
   * How it was launched, the shape that took most time first; empty where the trace does not say.
   */
  launch_shapes: KernelLaunch[];
}
/**
 * Runs of one kernel with the same numbers of blocks and threads.
 */
export interface KernelLaunch {
  /**
   * Blocks along each axis; None where the trace does not say, as the next three.
   */
  grid: [unknown, unknown, unknown] | null;
  /**
   * Threads of a block along each axis.
   */
  block: [unknown, unknown, unknown] | null;
  /**
   * Of each thread.
   */
  registers: number | null;
  /**
   * Bytes of each block.
   */
  shared_memory: number | null;
  /**
   * How often it ran so.
   */
  calls: number;
  /**
   * In all these runs.
   */
  device_us: number;
}
/**
 * All calls of one operator.
 */
export interface OperatorRow {
  /**
   * As in torch's tables, such as ``aten::mm``.
   */
  name: string;
  /**
   * How often it ran.
   */
  calls: number;
  host: Durations;
  host_self: Durations;
  /**
   * Kernels, copies and memsets launched in it and in what it called. None without a device, like the next.
   */
  device: Durations | null;
  /**
   * Launched in it itself, without what it called.
   */
  device_self: Durations | null;
  /**
   * Whether it is a matrix product, convolution, attention or recurrent layer.
   */
  tensor_cores_eligible: boolean;
  /**
   * What it called and launched itself, the longest first.
   */
  children: ChildRow[];
  /**
   * By lines of the user's code, the longest first; empty where the trace was taken without ``with_stack``.
   */
  called_from: CalledFrom[];
}
/**
 * What one operator called, or launched, itself: all such children of one name.
 */
export interface ChildRow {
  /**
   * Of the operator or the device event.
   */
  name: string;
  /**
   * ``device``: a kernel, copy or memset.
   */
  kind: "operator" | "device";
  /**
   * How often the parent called it.
   */
  calls: number;
  /**
   * Ratio: of the parent's total; None for a device event.
   */
  host: Durations | null;
  /**
   * Ratio: of the parent's total; None without a device.
   */
  device: Durations | null;
}
/**
 * A line of the user's code, and the calls of an operator that it made, those of their backward too.
 */
export interface CalledFrom {
  /**
   * File and line: ``net.py:7``. Where Python's calls were recorded, the line is its function's first.
   */
  place: string;
  /**
   * How many of the operator's calls.
   */
  calls: number;
  /**
   * Their time on the host.
   */
  host_us: number;
  /**
   * That of what was launched in them; None without a device.
   */
  device_us: number | null;
}
/**
 * What one operator allocated and freed on one device.
 */
export interface MemoryRow {
  /**
   * None: outside any operator.
   */
  name: string | null;
  /**
   * Whose memory it is.
   */
  device_type: "host" | "device";
  /**
   * -1 for the host.
   */
  device: number;
  /**
   * Calls of the operator in which memory was allocated or freed; events, outside any operator.
   */
  calls: number;
  /**
   * Allocated less freed, with what it called.
   */
  size_increase_bytes: number;
  /**
   * Without what it called; the sum over all rows of a device is what the trace changed.
   */
  self_size_increase_bytes: number;
  /**
   * Allocated, frees left out.
   */
  allocation_bytes: number;
  /**
   * Allocated without what it called, frees left out.
   */
  self_allocation_bytes: number;
  /**
   * How often memory was allocated, with what it called.
   */
  allocations: number;
}
/**
 * What one module allocated and freed on one device in its forward, or in its backward, all steps together.
 */
export interface ModuleMemoryRow {
  /**
   * Qualified name, the root's ``""``; None for what is no module's.
   */
  name: string | null;
  /**
   * ``backward``: with what it repeats of the forward.
   */
  part: "forward" | "backward" | "gradient accumulation" | "optimizer" | "elsewhere";
  /**
   * Whose memory it is.
   */
  device_type: "host" | "device";
  /**
   * -1 for the host.
   */
  device: number;
  /**
   * Allocated less freed, with the modules inside: what a forward keeps, what a backward leaves.
   */
  size_increase_bytes: number;
  /**
   * Without them; the sum over all rows of a device is what the trace changed.
   */
  self_size_increase_bytes: number;
  /**
   * Allocated, frees left out.
   */
  allocation_bytes: number;
  /**
   * Allocated without the modules inside, frees left out.
   */
  self_allocation_bytes: number;
}
/**
 * All copies or memsets of one kind, such as ``Memcpy HtoD (Pageable -> Device)``.
 */
export interface TransferRow {
  /**
   * Kind of the copy or memset.
   */
  name: string;
  /**
   * How many there were.
   */
  calls: number;
  /**
   * All together; None where the trace does not say.
   */
  bytes: number | null;
  /**
   * The calls that launched them. Ratio: of the steps' own marks on the host. None when no launch is known.
   */
  host: Durations | null;
  device: Durations;
}
/**
 * All runs of one ``record_function`` scope.
 */
export interface UserScopeRow {
  /**
   * As the user named it.
   */
  name: string;
  /**
   * How often it ran.
   */
  calls: number;
  host: Durations;
  /**
   * Work launched in the scope, by its thread or by autograd's while it was open. Ratio: of all device work.
   */
  device: Durations | null;
}
/**
 * Pauses between the first and the last event of a stream or of a whole device, by cause, as HTA names them.
 */
export interface IdleTime {
  /**
   * Its number.
   */
  device: number;
  /**
   * None: all streams of the device as one.
   */
  stream: number | null;
  /**
   * In which something ran.
   */
  busy_us: number;
  /**
   * The event that ended the pause was launched after the pause had begun.
   */
  host_wait_us: number;
  /**
   * Launched in time, and the pause is under ``KERNEL_GAP_LIMIT_US``.
   */
  kernel_gap_us: number;
  /**
   * Launched in time and a longer pause, or the launch is not known.
   */
  other_us: number;
}
/**
 * Launches of one kind of device event; a CUDA graph launches many events with one call.
 */
export interface LaunchRow {
  /**
   * Of what was launched.
   */
  kind: "kernel" | "memcpy" | "memset";
  /**
   * Calls.
   */
  launches: number;
  /**
   * What they launched.
   */
  events: number;
  host: Durations;
  device: Durations;
  delay: Durations;
  /**
   * Device events that took less time than the call that launched them.
   */
  shorter_than_launch: number;
  /**
   * Device events that began over ``LONG_DELAY_US`` after their call returned: they waited in the stream's queue.
   */
  long_delays: number;
}
/**
 * Memory of one device over time.
 */
export interface MemoryCurve {
  /**
   * Whose memory it is.
   */
  device_type: "host" | "device";
  /**
   * -1 for the host.
   */
  device: number;
  /**
   * Whether bytes are all that the allocator had given out; else the change since the trace began.
   */
  absolute: boolean;
  /**
   * The most at any moment.
   */
  peak_bytes: number;
  /**
   * When that was, after the first event of the trace.
   */
  peak_us: number;
  /**
   * In which step; None outside of steps, and where they are not marked.
   */
  peak_step: number | null;
  /**
   * What held the memory then, the most first; None where the trace has no addresses, as before torch 2.0.
   */
  held: HeldMemory[] | null;
  /**
   * In order of time, some hundreds at most: of each stretch the highest.
   */
  points: MemoryPoint[];
  /**
   * What ran meanwhile, in order of time: the marked steps and the phases in them. Of more than 1,000 the steps alone are kept, of more than 1,000 steps none.
   */
  spans: StepSpan[];
}
/**
 * Memory that was allocated in one place and not yet freed at the peak.
 */
export interface HeldMemory {
  /**
   * In whose forward or backward; None where that is not known.
   */
  module: string | null;
  /**
   * The outermost operator that was running; None outside of operators and, without allocations, before the trace.
   */
  operator: string | null;
  /**
   * All together.
   */
  bytes: number;
  /**
   * How many there are; None for what was there before the trace.
   */
  allocations: number | null;
}
/**
 * How much was allocated at a moment.
 */
export interface MemoryPoint {
  /**
   * After the first event of the trace.
   */
  us: number;
  /**
   * As ``MemoryCurve.peak_bytes``.
   */
  bytes: number;
}
/**
 * A step, or a phase of one, on the host's clock, on which memory is allocated.
 */
export interface StepSpan {
  /**
   * ``step 5``, ``data loader``, ``forward``, ``backward`` or ``optimizer``.
   */
  name: string;
  /**
   * After the first event of the trace.
   */
  start_us: number;
  /**
   * Likewise.
   */
  end_us: number;
}
/**
 * All calls of one operator with inputs of the same sizes and dtypes.
 */
export interface OperatorShapeRow {
  /**
   * As in ``OperatorRow``.
   */
  name: string;
  /**
   * Sizes of its tensors: ``[32, 3, 224, 224], [64, 3, 7, 7]``.
   */
  inputs: string;
  /**
   * Their dtypes, as C++ names them.
   */
  dtypes: string;
  /**
   * How often it ran.
   */
  calls: number;
  host: Durations;
  host_self: Durations;
  /**
   * What was launched in it and in what it called; None without a device.
   */
  device: Durations | null;
  /**
   * What it launched itself.
   */
  device_self: Durations | null;
}
/**
 * FLOPs of one trace, which is of one rank.
 */
export interface TraceFlops {
  /**
   * The device that ran the kernels; None without one, or where several kinds took part.
   */
  device: string | null;
  /**
   * How many of them took part.
   */
  devices: number;
  /**
   * Dense peak of one of them in FLOP/s, by the dtypes that ran; one that is not known is left out.
   */
  peaks: {
    [k: string]: number;
  };
  /**
   * Bandwidth of its memory; None where it is not known.
   */
  memory_bytes_per_sec: number | null;
  /**
   * In order of time.
   */
  steps: TracedStepFlops[];
  /**
   * FLOPs of what ran outside of every step.
   */
  outside_steps: number;
  /**
   * Over the whole trace, the one that took most time first.
   */
  operators: OperatorFlops[];
  /**
   * The same operators by the shapes of their inputs.
   */
  shapes: ShapeFlops[];
  /**
   * The same of kernels; None without a device.
   */
  kernels: KernelFlops[] | null;
  /**
   * Those that spent FLOPs, by name; None where the trace does not show modules.
   */
  modules: TracedModuleFlops[] | null;
  /**
   * FLOPs of forward and backward that no module owns; None likewise.
   */
  unattributed: number | null;
  /**
   * What may have spent FLOPs: all that depends on it is a lower bound.
   */
  uncounted: UncountedRow[];
  /**
   * Whether there is any.
   */
  lower_bound: boolean;
}
/**
 * FLOPs of one step on this rank, and how well it used the peak of its device.
 */
export interface TracedStepFlops {
  /**
   * The profiler's number; None where the whole trace is one step.
   */
  step: number | null;
  /**
   * Model FLOPs of what no autograd node ran; attention over the full score matrix.
   */
  forward: number;
  /**
   * Model FLOPs of what autograd's nodes ran.
   */
  backward: number;
  /**
   * What checkpointing ran again, and what a fused attention's backward repeats of its forward.
   */
  recompute: number;
  /**
   * What ran in an optimizer's step, or where a gradient was accumulated.
   */
  optimizer: number;
  /**
   * Of all these, what fused attention leaves out because its mask rules it out.
   */
  skipped: number;
  /**
   * The step's wall time, as in the table of step times.
   */
  wall_us: number;
  /**
   * (forward + backward) ÷ (peak × wall time), each dtype with its own peak; None where a peak is not known.
   */
  mfu: number | null;
  /**
   * The same of what the kernels executed: all four, less what was skipped.
   */
  hfu: number | null;
  /**
   * Something in the step was not counted, so that all its figures are at least these.
   */
  lower_bound: boolean;
}
/**
 * All counted calls of one operator in one dtype.
 */
export interface OperatorFlops {
  /**
   * Name as the counter has it: ``aten.mm``.
   */
  operator: string;
  /**
   * Of the arithmetic; ``tf32`` where a float32 operator launched a kernel whose name says tensor cores.
   */
  dtype: string;
  /**
   * How often it ran.
   */
  calls: number;
  /**
   * Model FLOPs of the forward.
   */
  forward: number;
  /**
   * Model FLOPs of the backward.
   */
  backward: number;
  /**
   * What was run again.
   */
  recompute: number;
  /**
   * What optimizers ran.
   */
  optimizer: number;
  /**
   * Of all these, what a mask let the kernel leave out.
   */
  skipped: number;
  /**
   * Of all tensors that it read and wrote, by shapes and dtypes; None where a result's shape is not known.
   */
  bytes: number | null;
  /**
   * On the device: its kernels, copies and memsets, added up. On the host, in a trace without a device: its calls. None where nothing of it is in the trace.
   */
  time_us: number | null;
  /**
   * Executed FLOPs ÷ time, of the calls whose time is known.
   */
  flops_per_sec: number | null;
  /**
   * That ÷ the peak of the device in this dtype; None where the peak is not known.
   */
  peak_share: number | null;
  /**
   * Arithmetic intensity: executed FLOPs ÷ bytes.
   */
  flops_per_byte: number | null;
  /**
   * Its roof: the lower of the peak and intensity × the memory's bandwidth; None where one of them is not known.
   */
  attainable_flops_per_sec: number | null;
}
/**
 * All counted calls of one operator with inputs of the same sizes and dtypes.
 */
export interface ShapeFlops {
  /**
   * As in ``OperatorShapeRow``, like the next two.
   */
  name: string;
  /**
   * Sizes of its tensors.
   */
  inputs: string;
  /**
   * Their dtypes.
   */
  dtypes: string;
  /**
   * How often it ran and was counted.
   */
  calls: number;
  /**
   * As in ``OperatorFlops``, like the next four.
   */
  forward: number;
  /**
   * Model FLOPs of the backward.
   */
  backward: number;
  /**
   * What was run again.
   */
  recompute: number;
  /**
   * What optimizers ran.
   */
  optimizer: number;
  /**
   * Of all these, what a mask let the kernel leave out.
   */
  skipped: number;
  /**
   * Executed FLOPs ÷ time, of the calls whose time is known.
   */
  flops_per_sec: number | null;
  /**
   * What part of that time they take at the peak of their dtypes; None where a peak is not known.
   */
  peak_share: number | null;
}
/**
 * All runs of one kernel that computed counted FLOPs.
 */
export interface KernelFlops {
  /**
   * As compiled.
   */
  name: string;
  /**
   * How often it ran for a counted operator.
   */
  calls: number;
  /**
   * Executed FLOPs of the operators in which no other kernel multiplied.
   */
  flops: number;
  /**
   * Of operators in which several kernels multiplied: divided among these by their time, an estimate.
   */
  shared_flops: number;
  /**
   * Of these runs.
   */
  time_us: number;
  /**
   * Both ÷ time.
   */
  flops_per_sec: number | null;
  /**
   * That ÷ the peak; None where it is not known, or where the runs were in several dtypes.
   */
  peak_share: number | null;
}
/**
 * FLOPs of one module over the whole trace, with the modules below it.
 */
export interface TracedModuleFlops {
  /**
   * As in the table of modules; the root's is ``""``.
   */
  name: string;
  /**
   * Model FLOPs of its forward.
   */
  forward: number;
  /**
   * Model FLOPs of its backward.
   */
  backward: number;
  /**
   * What its backward ran again.
   */
  recompute: number;
  /**
   * Of all three, what the modules below it did not spend.
   */
  own: number;
  /**
   * Executed FLOPs ÷ its forward and backward time in the table of modules.
   */
  flops_per_sec: number | null;
  /**
   * What part of that time its FLOPs take at the peak of their dtypes; None where a peak is not known.
   */
  peak_share: number | null;
}
/**
 * What may have spent FLOPs and was not counted.
 */
export interface UncountedRow {
  /**
   * Of the operator, or of a kernel that no counted operator launched.
   */
  name: string;
  /**
   * How often it ran.
   */
  calls: number;
  /**
   * Why it was not counted, without a full stop.
   */
  reason: string;
}
/**
 * One part of a traced step, mean over the traced steps; the parts add up to the step.
 */
export interface TracedPart {
  /**
   * As in ``records.TimePhase``; also what the run does in the middle of a step that is none of these.
   */
  name: string;
  /**
   * Without the parts inside it. Where a device took part, on the device's clock, up to its last kernel.
   */
  wall_sec: number;
  /**
   * Of it communication that no computation hides: here this rank may have waited for others.
   */
  exposed_sec: number;
}
/**
 * What filled each part of a traced step.
 */
export interface StepFilling {
  /**
   * ``device``: kernels, each of the kind of the operator that launched it. ``host``: operators, without a device.
   */
  clock: "host" | "device";
  /**
   * As in ``TracedStep.parts``.
   */
  parts: PartFilling[];
}
/**
 * What filled one part of a traced step, mean over the traced steps; the fields add up to the part's wall time.
 */
export interface PartFilling {
  /**
   * As in ``TracedPart``.
   */
  name: string;
  /**
   * Matmul-like operators: matrix products, convolutions, attention, recurrent layers.
   */
  matmul_ns: number;
  /**
   * All other operators.
   */
  operators_ns: number;
  /**
   * Copies and memsets on the device.
   */
  copies_ns: number;
  /**
   * Collectives, and what goes from one rank to another.
   */
  communication_ns: number;
  /**
   * Nothing of these ran: a device waited for its host, or the host ran Python between operators.
   */
  idle_ns: number;
}
/**
 * The calls that one rank made of one collective in one process group and step, in the order of their starts.
 */
export interface CollectiveCalls {
  /**
   * Of the collective.
   */
  name: string;
  /**
   * A text that all ranks of the group share and no other group has; None if it is not known.
   */
  group: string | null;
  /**
   * Ranks that take part; None where the trace does not say.
   */
  group_size: number | null;
  /**
   * Sender and receiver, for what goes from one rank to another; None for collectives.
   */
  channel: string | null;
  /**
   * The profiler's number of the step in which they were started; None in a trace without steps.
   */
  step: number | null;
  /**
   * How often it was called.
   */
  calls: number;
  /**
   * Of the larger side of each call, all calls together; None where the trace does not say.
   */
  bytes: number | null;
  /**
   * Latency of all calls together. Each rank adds up its own, so that no rank adds up those of thousands.
   */
  total_ns: number;
  /**
   * From start to end of each call, typecode ``q``; if there are fewer than *calls*, of the first calls.
   */
  latency_ns: number[];
}
/**
 * All ranks of a job together; every figure is of those that answered, and of one global step.
 */
export interface RanksProfile {
  /**
   * Ranks of the job.
   */
  world_size: number;
  /**
   * Ranks whose measurements are in here.
   */
  answered: number;
  /**
   * Every other rank, by number.
   */
  absences: RankAbsence[];
  /**
   * How long the rank that reports waited for the others' answers.
   */
  waited_sec: number;
  flops: StepFlops;
  /**
   * Of one copy of the model: summed over the ranks that see the same data, averaged over those that see different data, rounded to whole FLOPs. None if no rank of some stage of the pipeline answered.
   */
  flops_of_model: StepFlops | null;
  /**
   * Whether these FLOPs are lower bounds, because those of some rank are.
   */
  lower_bound: boolean;
  /**
   * Unique logical parameters of the whole model, the stages of a pipeline added up; None if a stage is missing.
   */
  params: number | null;
  /**
   * Of ``params``, those that need a gradient.
   */
  trainable_params: number | null;
  /**
   * Of all ranks that see different data; None if the samples of one are not known.
   */
  samples: number | null;
  /**
   * Likewise of tokens.
   */
  tokens: number | null;
  /**
   * Every part of a step.
   */
  parts: RanksPart[];
  /**
   * None if no rank timed a step.
   */
  global_step: RanksPart | null;
  model_flops: RankSpread;
  /**
   * Parameters that each rank holds in memory.
   */
  local_params: RankSpread | null;
  /**
   * Peak memory of tensors on each device, or of each process on the host.
   */
  peak_memory_bytes: RankSpread | null;
  /**
   * Most ranks first.
   */
  devices: DeviceGroup[];
  /**
   * Sum of the devices' peaks; None if one is not known.
   */
  peak_flops_per_sec: number | null;
  rates: JobRates;
  /**
   * Why a rate (by its field's name) is None, in a few words.
   */
  unavailable: {
    [k: string]: string;
  };
  /**
   * Of a pipeline; empty where there is none.
   */
  stages: StageProfile[];
  /**
   * In the traced steps; None if fewer than two ranks' traces show any.
   */
  communication: RanksCommunication | null;
  /**
   * Ranks that the others wait for, the one that they wait for longest first; empty where all keep pace.
   */
  stragglers: Straggler[];
  /**
   * What did not fit into the records, in sentences.
   */
  left_out: string[];
  /**
   * Each rank that answered, by number.
   */
  ranks: RankFigures[];
}
/**
 * A rank whose measurements are missing in the merged report.
 */
export interface RankAbsence {
  /**
   * Its number.
   */
  rank: number;
  /**
   * Why, as the end of a sentence.
   */
  reason: string;
}
/**
 * One part of a step over ranks.
 */
export interface RanksPart {
  /**
   * As in ``PartTiming``.
   */
  name: string;
  seconds: RankSpread;
}
/**
 * One figure over ranks: the least, the median and the greatest. If ranks tie, the lowest number is named.
 */
export interface RankSpread {
  /**
   * Ranks that have the figure.
   */
  ranks: number;
  /**
   * The figure of the rank that has the least.
   */
  least: number;
  /**
   * Which rank that is.
   */
  least_rank: number;
  /**
   * Of all ranks that have the figure.
   */
  median: number;
  /**
   * The figure of the rank that has the most.
   */
  greatest: number;
  /**
   * Which rank that is.
   */
  greatest_rank: number;
}
/**
 * Ranks whose devices are alike.
 */
export interface DeviceGroup {
  /**
   * As the driver has it.
   */
  device_name: string;
  /**
   * How many there are.
   */
  ranks: number;
  /**
   * Dense peak of one of them for the dtypes of the job's model FLOPs; None if that of one dtype is not known.
   */
  peak_flops_per_sec: number | null;
}
/**
 * Ratios of all ranks together; None where numerator or denominator is not known.
 */
export interface JobRates {
  /**
   * Model FLOPs of all ranks / sum over ranks of (peak for the job's dtypes x global_step_sec).
   */
  mfu: number | null;
  /**
   * The same of hardware FLOPs.
   */
  hfu: number | null;
  /**
   * Sum over the ranks that see different data of samples / global_step_sec.
   */
  samples_per_sec: number | null;
  /**
   * Likewise over iter_sec: DeepSpeed's figure.
   */
  iter_samples_per_sec: number | null;
  /**
   * Likewise of tokens, over global_step_sec.
   */
  tokens_per_sec: number | null;
  /**
   * tokens_per_sec / ranks that answered.
   */
  tokens_per_sec_per_device: number | null;
}
/**
 * One stage of a pipeline; FLOPs and parameters are those of one copy of the model.
 */
export interface StageProfile {
  /**
   * Its number in the pipeline, the first being 0.
   */
  stage: number;
  /**
   * Ranks of the stage that the figures are of.
   */
  answered: number;
  /**
   * Unique logical parameters of the stage; None if not known.
   */
  params: number | null;
  /**
   * Of ``params``, those that need a gradient.
   */
  trainable_params: number | null;
  flops: StepFlops;
  /**
   * Every part of a step over the stage's ranks.
   */
  parts: RanksPart[];
}
/**
 * Computation and communication of the ranks in a traced step.
 */
export interface RanksCommunication {
  /**
   * Ranks whose traces show communication.
   */
  ranks: number;
  wall_sec: RankSpread;
  computation_sec: RankSpread;
  communication_sec: RankSpread;
  exposed_sec: RankSpread;
  /**
   * Hidden ÷ all communication; None if no rank communicated at all.
   */
  overlap_ratio: RankSpread | null;
  /**
   * Of all matched calls; they may overlap, with each other and with computation. None without matched calls.
   */
  transfer_sec: RankSpread | null;
  /**
   * The rest of the matched calls: waiting for other ranks.
   */
  wait_sec: RankSpread | null;
  /**
   * Those that the ranks spent most time in first.
   */
  collectives: RanksCollective[];
  /**
   * What could not be matched, in sentences.
   */
  notes: string[];
}
/**
 * One collective on all ranks, in one step; call by call matched with the ranks that took part.
 */
export interface RanksCollective {
  /**
   * Of the collective.
   */
  name: string;
  /**
   * Ranks that called it.
   */
  ranks: number;
  /**
   * Of all ranks and traced steps, added up; likewise the next two.
   */
  calls: number;
  /**
   * Calls whose counterparts are known.
   */
  matched_calls: number;
  /**
   * None where a trace does not say.
   */
  bytes: number | null;
  /**
   * Time in which data can have moved: for each matched call the shortest of the ranks. None without such calls.
   */
  transfer_sec: RankSpread | null;
  /**
   * The rest: waiting for other ranks.
   */
  wait_sec: RankSpread | null;
}
/**
 * A rank that the others wait for, and what shows it; seconds are of one step.
 */
export interface Straggler {
  /**
   * Its number.
   */
  rank: number;
  /**
   * How much longer its own work takes than the median of the other ranks': so long they wait for it.
   */
  late_sec: number;
  /**
   * ``late_sec`` ÷ the other ranks' median step.
   */
  share: number;
  /**
   * What the finding rests on: many steps, or one.
   */
  shown_by: "timed steps" | "traced step";
  /**
   * The part of a step, as in ``PartTiming``, that has most of it; None if no part has half of it.
   */
  part: string | null;
  /**
   * How much longer that part takes than on the median of the other ranks.
   */
  part_sec: number | null;
  /**
   * Qualified name of the module that has at least half of that, children left out; None if there is none.
   */
  module: string | null;
  /**
   * How much longer that module takes than on the other ranks.
   */
  module_sec: number | null;
  /**
   * Its own communication that no computation hides, in the traced step; None if the step was not traced.
   */
  exposed_sec: number | null;
  /**
   * The same on the other ranks, their median: the longer it is, the longer they wait.
   */
  others_exposed_sec: number | null;
}
/**
 * One rank in a few figures of one step.
 */
export interface RankFigures {
  /**
   * Its number.
   */
  rank: number;
  /**
   * Name of its machine.
   */
  host: string;
  /**
   * Of the pipeline, the first being 0.
   */
  stage: number;
  /**
   * Forward + backward of one step on this rank.
   */
  model_flops: number;
  /**
   * What its kernels execute in one step.
   */
  hardware_flops: number;
  /**
   * Mean of each part of a step; empty if no step was timed.
   */
  parts_sec: {
    [k: string]: number;
  };
  /**
   * Mean wall time of its steps; None if none was timed.
   */
  global_step_sec: number | null;
  /**
   * Peak memory of tensors on its device, or of its process on the host; None if it was not looked at.
   */
  peak_memory_bytes: number | null;
  /**
   * Whether its traced step tells its own work from waiting for other ranks.
   */
  traced: boolean;
  /**
   * How many notes its own report has.
   */
  notes: number;
}
/**
 * One thing that holds the run back.
 */
export interface Advice {
  /**
   * The rule's name, which also begins the names of its thresholds.
   */
  rule: string;
  /**
   * What was measured, in a sentence.
   */
  evidence: string;
  /**
   * What it was held against, in words.
   */
  threshold: string;
  /**
   * What to try, in a sentence.
   */
  action: string;
  /**
   * Where the rule comes from.
   */
  source: string;
  /**
   * Share of the step that is at stake here and in no other advice; None if it is not known, or if other advice has all of it.
   */
  stake: number | null;
}
/**
 * Run B held against run A; immutable.
 */
export interface Comparison {
  /**
   * Of the JSON: ``SCHEMA_VERSION``.
   */
  schema_version: 1;
  a: ComparedRun;
  b: ComparedRun;
  /**
   * What a step is: ``global step``, or ``batch`` in runs that do not train.
   */
  step_name: string;
  /**
   * Device, ranks, batch, versions and settings that differ; what bears most on speed first.
   */
  settings: SettingDifference[];
  /**
   * Each number of ``Profile.summary()``.
   */
  figures: FigureDifference[];
  step: PartDifference;
  /**
   * Every part of a step.
   */
  parts: PartDifference[];
  /**
   * In B's tree order, the root first, each module that is gone behind those of B; last what no module owns.
   */
  modules: ModuleDifference[];
  /**
   * FLOPs that one byte weighs in the sum that work is measured by: the devices' peak ÷ memory bandwidth, or 10.
   */
  flops_per_byte: number;
  /**
   * Of the noise intervals.
   */
  confidence: number;
  /**
   * What could not be told, or was joined to something else, in sentences.
   */
  notes: string[];
}
/**
 * One of the two runs.
 */
export interface ComparedRun {
  /**
   * File, folder or URL it was read from, or ``A`` and ``B``.
   */
  source: string;
  /**
   * Of its profile.
   */
  profile_step: number;
  /**
   * How many steps its times are means over.
   */
  timed_steps: number;
  /**
   * Class of its root module; empty if it was not described.
   */
  model: string;
  /**
   * Name of its device.
   */
  device: string;
  /**
   * What was measured if it had too little processor time, which qualifies all its times; empty if it had enough.
   */
  starved: string;
}
/**
 * What is set up differently in the two runs, as text.
 */
export interface SettingDifference {
  /**
   * Where it stands in a profile: ``context.world_size``.
   */
  name: string;
  /**
   * In run A.
   */
  a: string;
  /**
   * In run B.
   */
  b: string;
}
/**
 * One figure of ``Profile.summary()`` in both runs.
 */
export interface FigureDifference {
  /**
   * As there.
   */
  name: string;
  /**
   * In run A; None if it is not known there.
   */
  a: number | null;
  /**
   * In run B.
   */
  b: number | null;
  /**
   * B / A; 1 if both are 0. None if it is not known, or only A is 0.
   */
  ratio: number | null;
  /**
   * Lower end of the ratio's noise; the ratio itself for a count, which has none. None if it is not known.
   */
  ratio_low: number | null;
  /**
   * Upper end.
   */
  ratio_high: number | null;
  /**
   * Why the ratio or its noise is None; empty if neither is.
   */
  reason: string;
}
/**
 * The whole step, or one part of it, in both runs.
 */
export interface PartDifference {
  /**
   * As in ``PartTiming``; parts that one of the runs cannot tell apart stand together.
   */
  name: string;
  causes: Causes;
  /**
   * Whether the rows of modules hold this part: they and ``(outside)`` then add up to it, less its waiting.
   */
  by_module: boolean;
  /**
   * Of the whole difference. None if single steps are not known or are too few.
   */
  difference: NoiseInterval | null;
}
/**
 * The time of something in run A and in run B, and what the difference B - A comes from.
 */
export interface Causes {
  /**
   * Of one step of A.
   */
  a_ns: number;
  /**
   * Of one step of B.
   */
  b_ns: number;
  /**
   * B - A.
   */
  difference_ns: number;
  /**
   * More work: other counts of FLOPs or bytes, and modules that only one of the runs has.
   */
  work_ns: number;
  /**
   * Worse efficiency: the same work, slower.
   */
  efficiency_ns: number;
  /**
   * More waiting: for data, for other ranks, for the host, and for the loop around the model.
   */
  waiting_ns: number;
  /**
   * Of the work: FLOPs changed.
   */
  work_flops_ns: number;
  /**
   * Of the work: bytes changed.
   */
  work_bytes_ns: number;
  /**
   * Of the work: modules that are new or gone.
   */
  work_modules_ns: number;
  /**
   * Of the waiting: the loop waits for its next batch.
   */
  waiting_data_ns: number;
  /**
   * Of the waiting: communication that no computation hides, and a pipeline's bubble.
   */
  waiting_communication_ns: number;
  /**
   * Of the waiting: the device has nothing to run while the host prepares.
   */
  waiting_idle_ns: number;
  /**
   * Of the waiting: batches move to the device; callbacks, logging, schedulers and what else the loop does.
   */
  waiting_loop_ns: number;
}
/**
 * Between which values a difference of mean steps would lie if both runs went on as they did.
 */
export interface NoiseInterval {
  /**
   * The lower end.
   */
  low_ns: number;
  /**
   * The upper end.
   */
  high_ns: number;
  /**
   * Zero is outside of it: the difference is more than the spread of the timed steps explains.
   */
  beyond: boolean;
}
/**
 * One module in both runs, or in one of them.
 */
export interface ModuleDifference {
  /**
   * In run A; None if it is new in B.
   */
  a: ModuleSide | null;
  /**
   * In run B; None if it is gone.
   */
  b: ModuleSide | null;
  /**
   * ``structure``: another name, the same tree of classes, settings, parameters and FLOPs. ``nothing``: only one of the runs has it.
   */
  matched_by: "name" | "structure" | "nothing";
  own: Causes;
  forward: Causes;
  backward: Causes;
  whole: Causes;
  /**
   * How far single steps stray: an own difference up to this may be the chance of the one traced step. None if single steps are not known.
   */
  noise_ns: number | null;
  /**
   * Whether the own difference is more than that.
   */
  beyond_noise: boolean | null;
}
/**
 * One module in one of the runs; counts are of one step, without the modules below it.
 */
export interface ModuleSide {
  /**
   * Qualified name; the root is ``""``, what no module owns ``(outside)``.
   */
  name: string;
  /**
   * Class of the module.
   */
  type_name: string;
  /**
   * Unique parameters of the module and all below it.
   */
  params: number;
  /**
   * Forward, backward and recomputation.
   */
  flops: number;
  /**
   * Read and written by its operators, likewise.
   */
  bytes: number;
}
/**
 * The reports of one trace for each rank, and the ranks side by side.
 */
export interface TracesReport {
  /**
   * Of the JSON; another one has other fields.
   */
  schema_version: 5;
  /**
   * By rank.
   */
  traces: TraceReport[];
  /**
   * None for a single trace.
   */
  ranks: RankComparison | null;
  /**
   * What the traces show that holds the run back, the most at stake first.
   */
  advice: Advice[];
  /**
   * FLOPs of all ranks together; None for a single trace, and for separate runs.
   */
  job_flops: JobFlops | null;
}
/**
 * All ranks whose traces are at hand, by rank.
 */
export interface RankComparison {
  /**
   * By number.
   */
  ranks: RankRow[];
  /**
   * The rank that computes longest per step, overlap included. None for one rank, if several tie, or if its trace names no rank. Whom the others wait for is for the advice to say.
   */
  computes_longest: number | null;
  /**
   * What could not be compared, in sentences.
   */
  notes: string[];
}
/**
 * One rank over its steps.
 */
export interface RankRow {
  /**
   * None where its trace does not say; then it goes by its source.
   */
  rank: number | null;
  /**
   * The trace's file or URL.
   */
  source: string;
  /**
   * How many steps its trace has.
   */
  steps: number;
  overlap: Overlap;
  /**
   * Of its matched calls, time in which data can have moved; None without matched calls.
   */
  transfer_us: number | null;
  /**
   * Of its matched calls, waiting for other ranks; None without matched calls.
   */
  wait_us: number | null;
  /**
   * Its computation per step ÷ the median of the ranks'. Whom the others wait for is for the advice to say.
   */
  compute_over_median: number | null;
  /**
   * Each collective that it called.
   */
  collectives: RankCollectiveRow[];
}
/**
 * All calls of one collective on one rank, matched call by call with the ranks that took part.
 */
export interface RankCollectiveRow {
  /**
   * Of the collective.
   */
  name: string;
  /**
   * How often this rank called it.
   */
  calls: number;
  /**
   * Calls whose counterparts are in the other ranks' traces.
   */
  matched_calls: number;
  /**
   * Of the larger side of each call, summed; None where the trace does not say.
   */
  bytes: number | null;
  /**
   * From start to end, all calls together.
   */
  latency_us: number;
  /**
   * For each matched call the shortest of the ranks, summed: time in which data can have moved. None unmatched.
   */
  transfer_us: number | null;
  /**
   * The rest of the matched calls: waiting for the other ranks.
   */
  wait_us: number | null;
}
/**
 * FLOPs of all ranks of a job together.
 */
export interface JobFlops {
  /**
   * Ranks that the job has; None where its traces do not say.
   */
  ranks: number | null;
  /**
   * Those that are in the traces of all ranks; empty if the job's FLOPs are not known.
   */
  steps: JobStepFlops[];
  /**
   * Why they are not known, without a full stop.
   */
  reason: string | null;
}
/**
 * FLOPs of one step of a job: those of all its ranks, added up.
 */
export interface JobStepFlops {
  /**
   * The profiler's number.
   */
  step: number;
  /**
   * As in ``TracedStepFlops``, like the next four.
   */
  forward: number;
  /**
   * Model FLOPs of what autograd's nodes ran.
   */
  backward: number;
  /**
   * What was run again.
   */
  recompute: number;
  /**
   * What optimizers ran.
   */
  optimizer: number;
  /**
   * Of all these, what fused attention leaves out.
   */
  skipped: number;
  /**
   * Mean of the ranks' wall times.
   */
  wall_us: number;
  /**
   * (forward + backward) of all ranks ÷ (peak × wall time of each, added up); None where one is not known.
   */
  mfu: number | null;
  /**
   * The same of what the kernels executed.
   */
  hfu: number | null;
  /**
   * On one of the ranks something was not counted.
   */
  lower_bound: boolean;
}
/**
 * The traces of run B held against those of run A; immutable.
 */
export interface TraceComparison {
  /**
   * Of the JSON: ``SCHEMA_VERSION``.
   */
  schema_version: 1;
  /**
   * What tells its JSON from that of two profiles compared.
   */
  kind: "traces";
  a: ComparedTraces;
  b: ComparedTraces;
  /**
   * Devices, ranks and what was recorded, where they differ.
   */
  settings: SettingDifference[];
  step: TimeDifference;
  /**
   * What filled the step, each moment under the first of these that ran then, as in ``StepTime``.
   */
  parts: TimeDifference[];
  /**
   * The step of each rank that both runs have; empty if that is one alone.
   */
  ranks: TimeDifference[];
  /**
   * By phase, module, kernel, operator and collective, as far as both runs show them.
   */
  tables: TimeTable[];
  /**
   * Step time, MFU, FLOPs, waiting and memory.
   */
  figures: FigureDifference[];
  /**
   * Of the noise intervals.
   */
  confidence: number;
  /**
   * What could not be told, in sentences.
   */
  notes: string[];
}
/**
 * The traces of one of the two runs.
 */
export interface ComparedTraces {
  /**
   * Files or URLs, by rank.
   */
  sources: string[];
  /**
   * How many of the run's ranks they are of.
   */
  ranks: number;
  /**
   * How many steps every one of them has: what is compared are the means over these.
   */
  steps: number;
  /**
   * False if they have no marks of steps: each is then one step as a whole.
   */
  marked: boolean;
  /**
   * Name of the device that ran the kernels; empty without one, or where it is not told.
   */
  device: string;
}
/**
 * The time of something in one step of A and of B: means over the traced steps, and over the ranks.
 */
export interface TimeDifference {
  /**
   * Of what took the time.
   */
  name: string;
  /**
   * In a step of A.
   */
  a_ns: number;
  /**
   * In a step of B.
   */
  b_ns: number;
  /**
   * B - A.
   */
  difference_ns: number;
  /**
   * How often it runs in a step of A; None for what is not called, as the next three.
   */
  calls_a: number | null;
  /**
   * In a step of B.
   */
  calls_b: number | null;
  /**
   * Of the difference: more calls, or fewer; all of it for what only one of the runs has.
   */
  calls_ns: number | null;
  /**
   * Of the difference: each call takes longer, or shorter.
   */
  length_ns: number | null;
  /**
   * Of the difference. None if single steps are not known, or too few.
   */
  noise: NoiseInterval | null;
}
/**
 * All things of one kind that at least one of the runs has.
 */
export interface TimeTable {
  /**
   * Which kind.
   */
  of: "phases" | "modules" | "kernels" | "operators" | "collectives";
  /**
   * Where their time passes. Operators have a table of each clock.
   */
  clock: "host" | "device";
  /**
   * The largest difference first.
   */
  rows: TimeDifference[];
}
