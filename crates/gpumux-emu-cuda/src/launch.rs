//! Launches of kernels: of those that the device knows by name, and of those that it interprets.

use std::sync::{Arc, Weak};

use gpumux_emu::protocol::Work;
use gpumux_ptx::Launch;

use crate::{
    border::Arguments,
    effect::Effect,
    error::{CuError, Result},
    fault::{self, Kind},
    hold,
    interpret::Interpreted,
    kernel::{self, Kernel, Shape},
    library::resolve,
    memory,
    module::{MOST_SHARED, SHARED},
    op::{Op, OpWork},
    process::lock,
    stream::stream,
    watch,
};

/// Bytes of a grid barrier's memory.
const WORKSPACE: u64 = 64;

/// Launches a kernel.
pub(crate) fn launch(
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    cooperative: bool,
    stream_handle: usize,
    arguments: Arguments,
) -> Result {
    let stream = stream(stream_handle)?;
    let context = stream.context()?;
    let function = resolve(function, &context)?;
    if !Weak::ptr_eq(&function.context, &Arc::downgrade(&context)) {
        return Err(CuError::INVALID_HANDLE);
    }
    let shape = Shape::new(grid, block)?;
    let (sms, together) = shape.width(&context.device.info);
    match fault::due(fault::At::Launch) {
        None => {}
        Some(Kind::Endless) => {
            // How long it takes is not known.
            return stream.submit(Op::compute(Work::Rest { sms }, Effect::Nothing));
        }
        Some(Kind::DeviceLost) => {
            context.fault(fault::code(Kind::DeviceLost));
            return Err(fault::code(Kind::DeviceLost));
        }
        Some(kind) => {
            let work = Work::Kernel {
                sms,
                duration: 1000,
            };
            return stream.submit(Op::compute(work, Effect::Fault(fault::code(kind))));
        }
    }
    let of = &function.program.kernels[function.kernel];
    let layout: Vec<_> = of
        .parameters
        .iter()
        .map(|it| (it.offset, it.size))
        .collect();
    let arguments = arguments.read(&layout)?;
    if kernel::is_known(&of.name) {
        let kernel = Kernel::new(&of.name, &arguments)?;
        let work = kernel.cost(shape, &context.device.info);
        if let Kernel::Hold {
            page,
            ticket,
            last,
            timeout,
        } = kernel
            && !stream.is_captured()
        {
            hold::begin(page, last)?;
            let op = Op::compute(work, Effect::Kernel(kernel));
            let id = context.submit(vec![(stream.id, op)])?;
            return watch::watch(&context, id, page, ticket, timeout);
        }
        return stream.submit(Op::compute(work, Effect::Kernel(kernel)));
    }
    if let Err(why) = of.usable() {
        eprintln!(
            "gpumux: the emulated device cannot run the kernel `{}`: {why}",
            of.name
        );
        // What follows cannot be right: everything fails from now on, as behind an instruction that a device lacks.
        context.spoil(CuError::ILLEGAL_INSTRUCTION);
        return Err(CuError::ILLEGAL_INSTRUCTION);
    }
    let most = match lock(&function.settings).0 {
        0 => SHARED,
        asked => (asked.max(0) as u32).max(SHARED - of.shared.min(SHARED)) + of.shared,
    };
    if of.shared.saturating_add(shared) > most.min(MOST_SHARED) {
        return Err(CuError::INVALID_VALUE);
    }
    let mut parameters = vec![0; of.parameter_bytes()];
    for ((offset, size), bytes) in layout.iter().zip(&arguments) {
        parameters[*offset..offset + size].copy_from_slice(bytes);
    }
    let workspace = match (cooperative, function.workspace.get()) {
        (false, _) => 0,
        (true, Some(at)) => *at,
        (true, None) => {
            // Goes with the context.
            let at = memory::alloc(context.device.index, context.handle(), WORKSPACE)?;
            let effect = Effect::Set {
                to: at,
                width: 4,
                value: 0,
                count: WORKSPACE / 4,
            };
            effect.run(0, WORKSPACE / 4)?;
            *function.workspace.get_or_init(|| at)
        }
    };
    if cooperative && shape.blocks > together * u64::from(context.device.info.sms) {
        return Err(CuError::COOPERATIVE_LAUNCH_TOO_LARGE);
    }
    let launch = Launch {
        module: Arc::clone(&function.program),
        kernel: function.kernel,
        grid,
        block,
        dynamic_shared: shared,
        parameters,
        globals: function.globals.to_vec(),
        resident: (together * u64::from(context.device.info.sms)) as usize,
        sms: context.device.info.sms,
        workspace,
    };
    let kernel = Interpreted {
        launch: Arc::new(launch),
        shape,
    };
    stream.submit(Op {
        work: OpWork::Plain(Work::Rest { sms }),
        ..Op::compute(Work::Record, Effect::Interpreted(kernel))
    })
}
