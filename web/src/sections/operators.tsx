import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { bytes, counted, duration, NOT_AVAILABLE, percent, plain, shortenedApart, si } from "../model/format";
import { operatorRows, roofOf } from "../model/roofline";
import { kernelFlops, launchWords, stepsOf } from "../model/trace";
import type { KernelRow, Profile, TraceReport } from "../schema";
import { SearchableGrid } from "../ui/grid";
import { Section, ShareCell } from "../ui/section";
import { Term } from "../ui/tip";

const NAME_CHARS = 52;

export function Operators({ profile }: { profile: Profile }): JSX.Element | null {
  const rows = useMemo(() => operatorRows(profile), [profile]);
  const traced = profile.traced?.tables?.operators != null;
  const device = profile.traced?.tables?.operators?.some((one) => one.device_self !== null) ?? false;
  const like = profile.traced?.like_counted === true;
  const peak = roofOf(profile).peaks[0]?.flopsPerSec ?? null;
  if (!rows.length) return null;
  return (
    <Section
      id="operators"
      title="Operators"
      note={
        <>
          Of one step. FLOPs and bytes are of the <Term word="counted step" />
          {traced ? (
            <>
              , times of the <Term word="traced step" />, {device ? "on the device" : "on the host"}
            </>
          ) : (
            "; no step was traced, so there are no times"
          )}
          .
        </>
      }
    >
      <SearchableGrid
        caption="Operators"
        what="operators"
        searched={(one) => `${one.name} ${one.dtypes}`}
        first={traced ? { key: "seconds", down: true } : { key: "flops", down: true }}
        keyOf={(one) => one.name}
        rows={rows}
        columns={[
          {
            key: "name",
            label: "operator",
            text: true,
            value: (one) => one.name,
            cell: (one) => <code>{one.name}</code>,
          },
          ...(traced
            ? [
                {
                  key: "seconds",
                  label: "self time",
                  value: (one: (typeof rows)[number]) => one.seconds,
                  cell: (one: (typeof rows)[number]) => (
                    <ShareCell share={one.share}>{one.seconds === null ? "–" : duration(one.seconds)}</ShareCell>
                  ),
                },
                {
                  key: "share",
                  label: "share",
                  value: (one: (typeof rows)[number]) => one.share,
                  cell: (one: (typeof rows)[number]) => (one.share === null ? "–" : percent(one.share, 1)),
                },
              ]
            : []),
          ...(device
            ? [
                {
                  key: "host",
                  label: "host own",
                  value: (one: (typeof rows)[number]) => one.hostSec,
                  cell: (one: (typeof rows)[number]) => (one.hostSec === null ? "–" : duration(one.hostSec)),
                },
              ]
            : []),
          { key: "calls", label: "calls", value: (one) => one.calls, cell: (one) => plain(one.calls) },
          { key: "flops", label: "FLOPs", value: (one) => one.flops, cell: (one) => (one.flops ? si(one.flops) : "–") },
          ...(traced && like
            ? [
                {
                  key: "rate",
                  label: "FLOP/s",
                  value: (one: (typeof rows)[number]) => (one.flops && one.seconds ? one.flops / one.seconds : null),
                  cell: (one: (typeof rows)[number]) =>
                    one.flops && one.seconds ? (
                      <>
                        {si(one.flops / one.seconds)}{" "}
                        {peak !== null && one.dtypes === profile.dtypes[0]?.dtype ? (
                          <span class="dim">{percent(one.flops / one.seconds / peak, 1)}</span>
                        ) : null}
                      </>
                    ) : (
                      "–"
                    ),
                },
              ]
            : []),
          {
            key: "bytes",
            label: "bytes",
            value: (one) => one.bytes,
            cell: (one) => (one.bytes ? bytes(one.bytes) : "–"),
          },
          ...(traced && like
            ? [
                {
                  key: "moved",
                  label: "bytes/s",
                  word: "bytes",
                  value: (one: (typeof rows)[number]) => (one.bytes && one.seconds ? one.bytes / one.seconds : null),
                  cell: (one: (typeof rows)[number]) =>
                    one.bytes && one.seconds ? `${si(one.bytes / one.seconds)}B/s` : "–",
                },
              ]
            : []),
          { key: "dtypes", label: "dtypes", text: true, value: (one) => one.dtypes, cell: (one) => one.dtypes },
        ]}
        height={400}
      />
    </Section>
  );
}

/** The kernels of traced steps; *of* says which those are. */
export function Kernels({ tables, of }: { tables: TraceReport; of: string }): JSX.Element | null {
  const known = useMemo(() => kernelFlops(tables), [tables]);
  const { kernels, kernel_summary: summary } = tables;
  const names = useMemo(() => shortenedApart(kernels?.map((one) => one.name) ?? [], NAME_CHARS), [kernels]);
  if (!kernels?.length) return null;
  const steps = stepsOf(tables);
  const launched = kernels.some((one) => one.launch_shapes.length > 0);
  const estimated = [...known.values()].some((one) => one.shared_flops > 0);
  return (
    <Section
      id="kernels"
      title="Kernels"
      note={
        <>
          Of the <Term word={of} />: {plain(kernels.length)} kernels in {plain((summary?.calls ?? 0) / steps)} launches
          {summary?.tensor_core_ratio != null
            ? `, ${percent(summary.tensor_core_ratio, 1)} of their time on tensor cores`
            : ""}
          {summary?.short_calls_ratio != null ? `, ${percent(summary.short_calls_ratio, 1)} shorter than 10 µs` : ""}.
          {estimated
            ? " ~: an operator's FLOPs, divided by time among the kernels in it that multiply, is an estimate."
            : ""}
        </>
      }
    >
      <SearchableGrid
        caption="Kernels"
        what="kernels"
        searched={(one) => one.name}
        first={{ key: "time", down: true }}
        keyOf={(one) => one.name}
        rows={kernels}
        columns={[
          {
            key: "name",
            label: "kernel",
            text: true,
            value: (one) => one.name,
            cell: (one) => <code title={one.name}>{names.get(one.name)}</code>,
          },
          {
            key: "time",
            label: "time",
            word: "device own",
            value: (one) => one.device.total_us,
            cell: (one) => (
              <ShareCell share={one.device.ratio}>{duration(one.device.total_us / 1e6 / steps)}</ShareCell>
            ),
          },
          {
            key: "share",
            label: "share",
            value: (one) => one.device.ratio,
            cell: (one) => percent(one.device.ratio, 1),
          },
          { key: "calls", label: "calls", value: (one) => one.calls, cell: (one) => plain(one.calls / steps) },
          {
            key: "mean",
            label: "mean",
            value: (one) => one.device.mean_us,
            cell: (one) => (
              <span title={`${duration(one.device.min_us / 1e6)} to ${duration(one.device.max_us / 1e6)}`}>
                {duration(one.device.mean_us / 1e6)}
              </span>
            ),
          },
          ...(known.size
            ? [
                {
                  key: "flops",
                  label: "FLOPs",
                  value: (one: KernelRow) => flopsOf(one)?.flops ?? null,
                  cell: (one: KernelRow) => about(one, si((flopsOf(one)?.flops ?? 0) / steps)),
                },
                {
                  key: "rate",
                  label: "FLOP/s",
                  value: (one: KernelRow) => known.get(one.name)?.flops_per_sec ?? null,
                  cell: (one: KernelRow) => about(one, si(known.get(one.name)?.flops_per_sec)),
                },
                {
                  key: "peak",
                  label: "of peak",
                  word: "share of peak",
                  value: (one: KernelRow) => known.get(one.name)?.peak_share ?? null,
                  cell: (one: KernelRow) => about(one, percent(known.get(one.name)?.peak_share, 1)),
                },
              ]
            : []),
          ...(summary?.tensor_core_ratio != null // AMD's and Intel's names do not tell
            ? [
                {
                  key: "tensor",
                  label: "tensor cores",
                  value: (one: KernelRow) => Number(one.tensor_cores),
                  cell: (one: KernelRow) =>
                    one.tensor_cores ? "yes" : one.tensor_cores_eligible ? "no, but could" : "no",
                },
              ]
            : []),
          {
            key: "occupancy",
            label: "occupancy",
            value: (one) => one.occupancy_percent,
            cell: (one) => (one.occupancy_percent === null ? "–" : `${plain(one.occupancy_percent)}%`),
          },
          ...(launched
            ? [
                {
                  key: "grid",
                  label: "blocks of threads",
                  text: true,
                  cell: (one: KernelRow) => <span title={launchesOf(one)}>{launchWords(one)}</span>,
                },
                {
                  key: "registers",
                  label: "registers",
                  value: (one: KernelRow) => one.launch_shapes[0]?.registers ?? null,
                  cell: (one: KernelRow) => dash(one.launch_shapes[0]?.registers),
                },
                {
                  key: "shared",
                  label: "shared memory",
                  value: (one: KernelRow) => one.launch_shapes[0]?.shared_memory ?? null,
                  cell: (one: KernelRow) => bytesOrDash(one.launch_shapes[0]?.shared_memory),
                },
              ]
            : []),
        ]}
        height={340}
      />
    </Section>
  );

  function flopsOf(kernel: KernelRow): { flops: number; estimated: boolean } | null {
    const found = known.get(kernel.name);
    return found ? { flops: found.flops + found.shared_flops, estimated: found.shared_flops > 0 } : null;
  }

  /** *words* of what was counted of *kernel*, marked where that is an estimate. */
  function about(kernel: KernelRow, words: string): string {
    const found = flopsOf(kernel);
    return found === null ? "–" : found.estimated && words !== NOT_AVAILABLE ? `~${words}` : words;
  }
}

function dash(value: number | null | undefined): string {
  return value == null ? "–" : plain(value);
}

function bytesOrDash(value: number | null | undefined): string {
  return value == null ? "–" : bytes(value);
}

/** How *kernel* was launched, a line for each shape. */
function launchesOf(kernel: KernelRow): string {
  return kernel.launch_shapes
    .slice(0, 12)
    .map(
      (one) =>
        `${one.grid?.join("×") ?? "?"} blocks of ${one.block?.join("×") ?? "?"} threads: ${counted(one.calls, "call")}, ${duration(one.device_us / 1e6)}`,
    )
    .join("\n");
}
