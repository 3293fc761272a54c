import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { bytes, duration, percent, plain, si } from "../model/format";
import { operatorRows, roofOf } from "../model/roofline";
import type { Profile } from "../schema";
import { SearchableGrid } from "../ui/grid";
import { Section, ShareCell } from "../ui/section";
import { Term } from "../ui/tip";

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

export function Kernels({ profile }: { profile: Profile }): JSX.Element | null {
  const tables = profile.traced?.tables ?? null;
  const kernels = tables?.kernels ?? null;
  const summary = tables?.kernel_summary ?? null;
  if (!kernels?.length) return null;
  const steps = Math.max(1, tables?.step_times.steps.length ?? 1);
  return (
    <Section
      id="kernels"
      title="Kernels"
      note={
        <>
          Of the <Term word="traced step" />: {plain(kernels.length)} kernels in {plain((summary?.calls ?? 0) / steps)}{" "}
          launches
          {summary?.tensor_core_ratio != null
            ? `, ${percent(summary.tensor_core_ratio, 1)} of their time on tensor cores`
            : ""}
          {summary?.short_calls_ratio != null ? `, ${percent(summary.short_calls_ratio, 1)} shorter than 10 µs` : ""}.
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
            cell: (one) => <code title={one.name}>{one.name}</code>,
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
            cell: (one) => duration(one.device.mean_us / 1e6),
          },
          {
            key: "tensor",
            label: "tensor cores",
            value: (one) => Number(one.tensor_cores),
            cell: (one) => (one.tensor_cores ? "yes" : one.tensor_cores_eligible ? "no, but could" : "no"),
          },
          {
            key: "occupancy",
            label: "occupancy",
            value: (one) => one.occupancy_percent,
            cell: (one) => (one.occupancy_percent === null ? "–" : `${plain(one.occupancy_percent)}%`),
          },
        ]}
        height={340}
      />
    </Section>
  );
}
