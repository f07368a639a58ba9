//! SM shares inside a simulated group: measured while its members run, set by the rule of `gpumux-core`.
//!
//! Windows take turns: one with the shares in force, one with an excursion from them. Each teaches points of the members'
//! curves; after the excursion the shares are divided anew, and move if the gain is worth it. Throughput is
//! counted in SM time done per time in which the group had the device, so that time sharing with others doesn't show.

use gpumux_core::TenantSpec;
use gpumux_core::space::{Claimant, Curve, Explorer, Rule, STEP, divide, minimum, worth_moving};

use crate::gpu::{Gpu, GroupId, Nanos, PartitionId, StreamId};

/// Length of an excursion, and of the first windows between two.
const WINDOW: Nanos = 100_000_000;
/// Windows between excursions grow as long as no share moves, up to this.
const QUIET: Nanos = 32 * WINDOW;
/// A window in which the group had less of the device than this tells nothing.
const ENOUGH: Nanos = WINDOW / 4;

pub(crate) struct Shares {
    rule: Rule,
    members: Vec<Member>,
    explorer: Explorer,
    /// SMs in force, when nothing is being tried.
    settled: Option<Vec<u32>>,
    trying: bool,
    /// How long to wait for the next excursion.
    quiet: Nanos,
    since: Nanos,
    group_busy: Nanos,
}

struct Member {
    stream: StreamId,
    partition: PartitionId,
    spec: TenantSpec,
    curve: Curve,
    /// SMs it has now.
    sms: u32,
    work: u64,
}

impl Shares {
    pub(crate) fn new(rule: Rule) -> Self {
        Self {
            rule,
            members: Vec::new(),
            explorer: Explorer::default(),
            settled: None,
            trying: false,
            quiet: WINDOW,
            since: 0,
            group_busy: 0,
        }
    }

    /// A member came.
    pub(crate) fn join(
        &mut self,
        gpu: &mut Gpu,
        group: GroupId,
        stream: StreamId,
        spec: &TenantSpec,
    ) {
        let sms = gpu.hardware().sms;
        let partition = gpu.add_partition(sms);
        gpu.confine(stream, Some(partition)).expect("both exist");
        self.members.push(Member {
            stream,
            partition,
            spec: spec.clone(),
            curve: Curve::default(),
            sms,
            work: 0,
        });
        self.divide_anew(gpu, group);
    }

    /// A member goes.
    pub(crate) fn leave(&mut self, gpu: &mut Gpu, group: GroupId, stream: StreamId) {
        for gone in self
            .members
            .extract_if(.., |member| member.stream == stream)
        {
            gpu.remove_partition(gone.partition).expect("its own");
        }
        self.divide_anew(gpu, group);
    }

    /// SMs that a member has, excursions apart.
    pub(crate) fn sms(&self, stream: StreamId) -> Option<u32> {
        let at = self.members.iter().position(|it| it.stream == stream)?;
        self.settled.as_ref()?.get(at).copied()
    }

    /// Looks whether a window is over; then learns, and sets what comes next.
    pub(crate) fn tick(&mut self, gpu: &mut Gpu, group: GroupId) {
        let window = if self.trying { WINDOW } else { self.quiet };
        if self.rule != Rule::Utility || gpu.now() < self.since + window {
            return;
        }
        let Some(settled) = self.settled.clone() else {
            return;
        };
        let busy = gpu.received(group).expect("lives").busy - self.group_busy;
        if busy >= ENOUGH {
            for member in &mut self.members {
                let work = gpu.stream_received(member.stream).expect("its own").work;
                let rate = (work - member.work) as f64 / busy as f64;
                member.curve.measure(member.sms, rate);
            }
        }
        let whole = gpu.hardware().sms;
        let mut next = settled.clone();
        if self.trying {
            let claims = self.claims(whole);
            if let Some(best) = divide(self.rule, &claims, whole, STEP)
                && worth_moving(&claims, &settled, &best, whole)
            {
                next = best;
                self.quiet = WINDOW;
            } else {
                self.quiet = (self.quiet + WINDOW / 4).min(QUIET);
            }
            self.settled = Some(next.clone());
            self.trying = false;
        } else {
            let mut explorer = self.explorer.clone();
            if let Some(trial) = explorer.next(&self.claims(whole), &settled) {
                next = trial.shares;
                self.trying = true;
            }
            self.explorer = explorer;
        }
        self.set(gpu, group, &next);
    }

    fn divide_anew(&mut self, gpu: &mut Gpu, group: GroupId) {
        let whole = gpu.hardware().sms;
        self.settled = divide(self.rule, &self.claims(whole), whole, STEP);
        self.trying = false;
        self.quiet = WINDOW;
        let shares = self.settled.clone();
        let all = vec![whole; self.members.len()];
        self.set(gpu, group, &shares.unwrap_or(all));
    }

    /// The group is presumed to have the device: what others take of its time they take of all members.
    fn claims(&self, whole: u32) -> Vec<Claimant<'_>> {
        let part = |share: f64| minimum(share, 1.0, whole);
        self.members
            .iter()
            .map(|member| Claimant {
                weight: member.spec.weight,
                min: part(member.spec.guaranteed),
                max: part(member.spec.limit),
                curve: &member.curve,
            })
            .collect()
    }

    fn set(&mut self, gpu: &mut Gpu, group: GroupId, shares: &[u32]) {
        self.since = gpu.now();
        self.group_busy = gpu.received(group).expect("lives").busy;
        for (member, sms) in self.members.iter_mut().zip(shares) {
            member.sms = *sms;
            member.work = gpu.stream_received(member.stream).expect("its own").work;
            gpu.resize_partition(member.partition, *sms)
                .expect("its own");
        }
    }
}
