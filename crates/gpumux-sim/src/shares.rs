//! SM shares inside a simulated group, set by the rule of `gpumux-core` when a member comes or goes. What a program makes of more SMs is
//! known of its scenario, as of a profile that was measured before.

use gpumux_core::TenantSpec;
use gpumux_core::space::{Bandwidth, Claimant, Curve, Rule, STEP, divide, minimum};

use crate::gpu::{Gpu, PartitionId, StreamId};
use crate::scenario::Work;

pub(crate) struct Shares {
    rule: Rule,
    members: Vec<Member>,
    /// SMs of each, where they are divided.
    divided: Option<Vec<u32>>,
}

struct Member {
    stream: StreamId,
    partition: PartitionId,
    spec: TenantSpec,
    curve: Curve,
}

impl Shares {
    pub(crate) fn new(rule: Rule) -> Self {
        Self {
            rule,
            members: Vec::new(),
            divided: None,
        }
    }

    /// A member came.
    pub(crate) fn join(&mut self, gpu: &mut Gpu, stream: StreamId, spec: &TenantSpec, work: &Work) {
        let whole = gpu.hardware().sms;
        let partition = gpu.add_partition(whole);
        gpu.confine(stream, Some(partition)).expect("both exist");
        self.members.push(Member {
            stream,
            partition,
            spec: spec.clone(),
            curve: curve(work, whole),
        });
        self.divide_anew(gpu);
    }

    /// A member goes.
    pub(crate) fn leave(&mut self, gpu: &mut Gpu, stream: StreamId) {
        for gone in self
            .members
            .extract_if(.., |member| member.stream == stream)
        {
            gpu.remove_partition(gone.partition).expect("its own");
        }
        self.divide_anew(gpu);
    }

    /// SMs that a member has.
    pub(crate) fn sms(&self, stream: StreamId) -> Option<u32> {
        let at = self.members.iter().position(|it| it.stream == stream)?;
        self.divided.as_ref()?.get(at).copied()
    }

    /// The group is presumed to have the device: what others take of its time they take of all members.
    fn divide_anew(&mut self, gpu: &mut Gpu) {
        let whole = gpu.hardware().sms;
        let part = |share: f64| minimum(share, 1.0, whole);
        let members = self.members.iter();
        let claims = members.map(|member| Claimant {
            weight: member.spec.weight,
            min: part(member.spec.guaranteed),
            max: part(member.spec.limit),
            curve: &member.curve,
            bandwidth: Bandwidth::default(),
        });
        self.divided = divide(self.rule, &claims.collect::<Vec<_>>(), whole, STEP);
        for (at, member) in self.members.iter().enumerate() {
            let sms = self.divided.as_ref().map_or(whole, |shares| shares[at]);
            gpu.resize_partition(member.partition, sms)
                .expect("its own");
        }
    }
}

/// What a program makes of more SMs: kernels that use fewer than all stop scaling there.
fn curve(work: &Work, whole: u32) -> Curve {
    let stops = match work {
        Work::Kernels { sms, .. } => sms.map_or(whole, |sms| sms.min(whole)),
        Work::Llm { .. } => whole,
    };
    Curve::measured([(stops, 1.0), (whole, 1.0)])
}
